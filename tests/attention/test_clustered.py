"""Clustered attention, plain and improved: the exact identities, the mask that they hand back, and their limits."""

from typing import Any

import pytest
import torch

import longspan
from longspan.ops.compress import clusters, prototypes
from support.tensors import close, data, same

N, DIM, HEADS = 29, 12, 3
MASK = torch.tensor([[True] * 29, [False] * 4 + [True] * 9 + [False] * 11 + [True] * 5])
SEGMENTS = torch.tensor([[0] * 13 + [1] * 16, [0] * 3 + [1] * 20 + [2] * 6])
SPECS = (
    "clustered(clusters=4, bits=19, iterations=5)",
    "improved_clustered(clusters=4, bits=19, iterations=5, topk=6)",
)
BOTH = pytest.mark.parametrize("spec", SPECS)


def build(spec) -> Any:
    torch.manual_seed(0)
    return longspan.build(spec, DIM, HEADS, causal=False).double()


def heads(module, part, x):
    return getattr(module, part)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)


def dense(module, x, record):
    """Softmax attention of the recorded clusters and keys, query by query, with gradients."""
    q, k, v = (heads(module, part, x) for part in ("query", "key", "value"))
    allowed = record["mask"].expand(len(x), HEADS, x.shape[1], k.shape[2])
    groups, chosen, rows = record["groups"], record.get("chosen"), []
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        seen, own = allowed[b, h, i], groups[b, h] == groups[b, h, i]
        if groups[b, h, i] == module.clusters or not seen.any():
            rows.append(0 * v[b, h, 0])
            continue
        # A packed row's clusters have the same numbers in each sequence.
        own = own & seen
        p = (k[b, h][seen] @ q[b, h][own].mean(0) / 2).softmax(0)
        if chosen is not None:
            picked = chosen[b, h, i][seen]
            anew = (k[b, h][seen][picked] @ q[b, h, i] / 2).softmax(0)
            p = p.masked_fill(picked, 0.0).index_put((picked.nonzero()[:, 0],), p[picked].sum() * anew)
        rows.append(p @ v[b, h][seen])
    o = torch.stack(rows).view(*q.shape[:3], -1)
    return module.out(o.transpose(1, 2).flatten(-2))


@BOTH
@pytest.mark.parametrize("arguments", [{}, {"mask": MASK, "segments": SEGMENTS}])
def test_it_equals_softmax_under_the_clusters_that_it_tells(spec, arguments):
    module, x, record = build(spec), data(2, N, DIM).requires_grad_(), {}
    found = module(x, record=record, **arguments)[0]
    real = arguments.get("mask", torch.ones_like(MASK))
    expected = dense(module, x, record)
    same(found[real], expected[real], (x, *module.parameters()))
    o = (record["matrix"] @ heads(module, "value", x)).transpose(1, 2).flatten(-2)
    close(module.out(o)[real], found[real])
    close(record["matrix"].sum(-1).transpose(1, 2)[real], torch.ones(int(real.sum()), HEADS, dtype=torch.float64))
    assert (record["groups"].transpose(1, 2)[~real] == 4).all()
    assert record["groups"].transpose(1, 2)[real].unique().tolist() == [0, 1, 2, 3]
    if "chosen" in record:
        assert (record["chosen"].sum(-1).transpose(1, 2)[real] <= 6).all()
        assert not (record["chosen"] & ~record["mask"]).any()
        # The keys with the largest of the cluster's weights: what is left weighs less.
        p, chosen = record["matrix"], record["chosen"]
        plain = build(SPECS[0])
        plain.load_state_dict(module.state_dict())
        weighed: dict = {}
        plain(x, record=weighed, **arguments)
        assert torch.equal(weighed["groups"], record["groups"])
        least = weighed["matrix"].masked_fill(~chosen, 2.0).amin(-1)
        most = p.masked_fill(chosen, -1.0).amax(-1)
        assert (least >= most).all()


@BOTH
def test_queries_alone_read_otherwise_so_there_is_no_cross_attention(spec):
    module, x = build(spec), data(2, N, DIM)
    q, k, v = (heads(module, part, x) for part in ("query", "key", "value"))
    reader = prototypes.Reader(module.planes, 4, 5, getattr(module, "topk", 0))
    together = reader(q, k, v, mask=None, segments=None)[:, :, 5:]
    groups = clusters.assign(q[:, :, 5:], module.planes, 4, 5)
    assert (prototypes.attend(q[:, :, 5:], k, v, groups, 4, topk=reader.topk) - together).abs().max() > 1e-3
    with pytest.raises(ValueError, match="clustered does not support context=; it supports: mask, record, segments"):
        module(x, context=x)


@pytest.mark.parametrize("n", [139, 300])
def test_clusters_of_several_tiles_are_the_definition(n):
    module, x = build("improved_clustered(clusters=2, bits=7, iterations=3, topk=9)"), data(1, n, DIM).requires_grad_()
    record: dict = {}
    found = module(x, record=record)[0]
    assert record["groups"].flatten(0, 1)[0].bincount().max() > 64
    same(found, dense(module, x, record), [x])
