"""Exact top-k attention against sorting, row by row, and against dense attention under the mask that it hands back."""

import pytest
import torch

from longspan.ops.compress import blocks, select
from longspan.ops.softmax import dense
from support.sparse import build, by_hand, data, heads_of, softmax
from support.tensors import same

N = 29
BOTH = pytest.mark.parametrize("causal", [True, False])
MASK = torch.rand(2, N, generator=torch.Generator().manual_seed(3)) < 0.7


def chosen(module, x, allowed, keys):
    """(B,H,N,N) by sorting each query's scores; of equal ones the first come first."""
    q, k = heads_of(module, x, "query", "key")
    logits = (q @ k.mT).masked_fill(~allowed, -torch.inf)
    order = logits.argsort(dim=-1, descending=True, stable=True)[..., :keys]
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, True) & allowed


def test_by_hand():
    """Scores are the tokens themselves, so that one key is the largest so far."""
    parts = {"query": (0, 1), "key": (1, 0), "value": (1, 0), "out": (1, 0)}
    assert by_hand("exact_topk(keys=1)", [3.0, 1.0, 5.0, 2.0], **parts) == [3.0, 3.0, 5.0, 5.0]


@BOTH
@pytest.mark.parametrize("keys", [1, 2, 5, N - 1])
@pytest.mark.parametrize("given", ["nothing", "mask", "segments"])
def test_it_is_softmax_under_the_mask_that_it_hands_back(given, keys, causal, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_SCORES", 1)  # blocks of 16 queries
    module, x = build(f"exact_topk(keys={keys})", causal=causal), data(N).requires_grad_()
    allowed = torch.ones(2, 1, N, N, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    arguments, real = {}, torch.ones(2, N, dtype=torch.bool)
    if given == "mask":
        arguments, real, allowed = {"mask": MASK}, MASK, allowed & MASK[:, None, None]
    if given == "segments":
        segments = torch.tensor([[0] * 7 + [1] * 22, [4] * N])
        arguments = {"segments": segments}
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    record: dict = {}
    y = module(x, record=record, **arguments)[0]
    mask = chosen(module, x, allowed, keys)
    assert torch.equal(record["mask"][real[:, None].expand(-1, 2, -1)], mask[real[:, None].expand(-1, 2, -1)])
    assert record["mask"].sum(-1).max() <= keys
    o = softmax(record["mask"], *heads_of(module, x, "query", "key", "value"))
    expected = module.out(o.transpose(1, 2).flatten(-2))
    same(y[real], expected[real], (x, *module.parameters()))


@BOTH
def test_one_key_is_the_value_of_the_best(causal):
    module, x = build("exact_topk(keys=1)", causal=causal), data(N)
    q, k, v = heads_of(module, x, "query", "key", "value")
    logits = q @ k.mT
    if causal:
        logits = logits.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -torch.inf)
    best = v.gather(2, logits.argmax(-1)[..., None].expand_as(v))
    torch.testing.assert_close(module(x)[0], module.out(best.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-10)


def test_of_equal_scores_the_first_are_kept():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])[None, None]
    allowed = torch.tensor([[True] * 5, [False, True, True, False, True]])
    mask = select.largest(logits, allowed, 2)[0, 0].long().tolist()
    assert mask == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]
    assert select.largest(logits, allowed, 4)[0, 0].long().tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 0, 1]]


def test_equal_tokens_of_the_future_take_no_place():
    """All scores of a query are equal, so that only the rule for ties decides."""
    module, x = build("exact_topk(keys=2)"), data(N)
    torch.nn.init.zeros_(module.query.weight)
    torch.nn.init.zeros_(module.query.bias)
    record: dict = {}
    y = module(x, record=record)[0]
    assert record["mask"][..., :2].sum((-1, -2)).eq(2 * N - 1).all()
    assert record["mask"].sum(-1).eq(torch.arange(1, N + 1).clamp(max=2)).all()
    for t in (1, 2, 7, 28):
        changed = torch.cat([x[:, :t], 3 * data(N - t, seed=4)], 1)
        torch.testing.assert_close(module(changed)[0][:, :t], y[:, :t], rtol=0, atol=0)


def test_memory_is_that_of_blocks(monkeypatch):
    """No tensor of all pairs is made, and none is kept for the backward."""
    monkeypatch.setattr(blocks, "MAX_SCORES", 2**12)
    shapes = []
    weights = select.weights

    def spy(*operands):
        p, mask, lse = weights(*operands)
        shapes.append(p.shape)
        return p, mask, lse

    monkeypatch.setattr(select, "weights", spy)
    module, x = build("exact_topk(keys=3)"), data(139).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        y = module(x)[0]
    y.sum().backward()
    assert len(shapes) == 2 * -(-139 // 16)
    assert max(shape[2] for shape in shapes) == 16
    assert max(kept) < 139 * 139


def test_a_row_without_keys_reads_zero():
    q, k, v = (data(5)[:, None] for _ in range(3))
    none = torch.zeros(5, 5, dtype=torch.bool)
    assert not select.attend(q, k, v, lambda start, stop: none[start:stop], 2).any()
    mask = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(select.attend(q, k, v, lambda i, j: mask[i:j], 9), dense.attend(q, k, v, mask=mask))
