"""Reformer against the definition: hashes, rounds, chunks, the own key, and the leak of the published chunks."""

import pytest
import torch

import longspan
from longspan.ops import buckets as op
from longspan.ops.tensors import merge, split
from support.tensors import data, same

N = 37
MASK = torch.tensor([[True] * 5 + [False] * 3 + [True] * 29, [False] * 2 + [True] * 35])
SPEC = "reformer(chunk=3, buckets=4, rounds=3)"


def build(spec=SPEC, dim=6, heads=2, **place):
    torch.manual_seed(0)
    return longspan.build(spec, dim, heads, **place).double()


def definition(module, x, allowed):
    """softmax of q . k / |k| over the allowed pairs (B,H,N,N), and its matrix."""
    q, v = (split(part(x), module.heads) for part in (module.query, module.value))
    k = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    p = (module.scale * q @ k.mT).masked_fill(~allowed, -torch.inf)
    p = p.masked_fill(~allowed.any(-1, keepdim=True), 0.0).softmax(-1).masked_fill(~allowed, 0.0)
    return module.out(merge(p @ v)), p


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        (SPEC, True),
        ("reformer(chunk=2, buckets=8, rounds=2, factor=2, scale=0.5)", True),
        ("reformer(chunk=4, buckets=4, rounds=3, published=True)", True),
        ("reformer(chunk=4, buckets=4, rounds=2, published=True, cross=True)", True),
        (SPEC, False),
        ("reformer(chunk=4, buckets=4, rounds=2, cross=True)", False),
    ],
)
def test_it_is_softmax_under_the_recorded_mask(spec, causal):
    """Outputs and gradients; the mask is the union of the rounds."""
    module, x = build(spec, causal=causal), data(2, N, 6).requires_grad_()
    wanted = [x, *module.parameters()]
    for given in ({}, {"mask": MASK}):
        record, real = {}, given.get("mask", torch.ones_like(MASK))
        y = module(x, record=record, **given)[0]
        expected, matrix = definition(module, x, record["mask"])
        pairs = real[:, None, :, None]
        torch.testing.assert_close(record["matrix"] * pairs, matrix * pairs, rtol=1e-10, atol=1e-10)
        same(y[real], expected[real], wanted)
    record, reader = {}, module.reader()
    module(x, record=record)
    groups = module.hash(split(module.query(x), 2))
    seen, shown = op.multiplicity(groups, reader.buckets, reader.rule)
    assert torch.equal(record["mask"], seen)
    assert shown.max() == reader.rounds


def test_bidirectional_chunks_by_hand():
    """Chunks of two of the tokens sorted by bucket; each reads its own chunk, the one before, and the first the last.

    Buckets are the sign of the first channel: right 0 2 3 6, left 1 4 5, and the last chunk has one token.
    """
    x = torch.tensor([[1.0, 5.0], [-1.0, 6.0], [2.0, 7.0], [3.0, 8.0], [-4.0, 9.0], [-2.0, 3.0], [0.5, 4.0]])
    within = {0: [2], 2: [0], 3: [0, 2, 6], 6: [0, 2, 3], 1: [4], 4: [1], 5: [1, 4]}
    across = {0: [2, 5], 2: [0, 5], 3: [0, 2, 6], 6: [0, 2, 3], 1: [3, 4, 6], 4: [1, 3, 6], 5: [1, 4]}
    for cross, lists in ((False, within), (True, across)):
        module = build(f"reformer(chunk=2, buckets=2, rounds=1, cross={cross})", 2, 1, causal=False)
        with torch.no_grad():
            for part in (module.query, module.value, module.out):
                part.weight.copy_(torch.eye(2))
                part.bias.zero_()
            module.rotations.copy_(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
        assert module.hash(split(x.double()[None], 1)).tolist() == [[[[0, 1, 0, 0, 1, 1, 0]]]]
        allowed = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
        for token, seen in lists.items():
            allowed[0, 0, token, seen] = True
        record = {}
        y, _ = module(x.double()[None], record=record)
        assert torch.equal(record["mask"], allowed)
        torch.testing.assert_close(y, definition(module, x.double()[None], allowed)[0], rtol=1e-10, atol=1e-10)


class TestHash:
    def test_only_the_direction_matters(self):
        module, q = build("reformer(buckets=8)", 32, 2), data(2, 2, 50, 16)
        for length in (0.01, 3.0, 1e4):
            assert torch.equal(module.hash(length * q), module.hash(q))
        assert not torch.equal(module.hash(-q), module.hash(q))
        assert torch.equal((module.hash(-q) - module.hash(q)).abs(), torch.full_like(module.hash(q), 4))

    def test_two_small_hashes_make_a_large_one(self):
        module, q = build("reformer(buckets=24, factor=4, rounds=2)", 32, 2), data(2, 2, 500, 16)
        found = module.hash(q)
        y = torch.einsum("bhnd,hdrf->bhrnf", q, module.rotations)
        small, large = (torch.cat([t, -t], -1).argmax(-1) for t in y.split([2, 3], -1))
        assert torch.equal(found, small + 4 * large)
        assert set(found.flatten().tolist()) == set(range(24))
        assert build("reformer(buckets=24)", 32, 2).rotations.shape[-1] == 12 > y.shape[-1] == 5
