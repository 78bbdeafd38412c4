"""Exact top-k attention against sorting, row by row, and against dense attention under the mask that it hands back."""

import pytest
import torch

from longspan.ops.compress import blocks, select
from longspan.ops.softmax import dense
from support.sparse import build, data, heads_of, past, softmax
from support.tensors import same

N = 29
BOTH = pytest.mark.parametrize("causal", [True, False])


def chosen(module, x, allowed, keys):
    """(B,H,N,N) by sorting each query's scores; of equal ones the first come first."""
    q, k = heads_of(module, x, "query", "key")
    logits = (q @ k.mT).masked_fill(~allowed, -torch.inf)
    order = logits.argsort(dim=-1, descending=True, stable=True)[..., :keys]
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, True) & allowed


@BOTH
@pytest.mark.parametrize("keys", [1, 2, 5, N - 1])
def test_it_is_softmax_under_the_mask_that_it_hands_back(keys, causal, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_SCORES", 1)  # blocks of 16 queries
    module, x = build(f"exact_topk(keys={keys})", causal=causal), data(N).requires_grad_()
    allowed = past(N) if causal else torch.ones(N, N, dtype=torch.bool)
    record: dict = {}
    y = module(x, record=record)[0]
    assert torch.equal(record["mask"], chosen(module, x, allowed, keys))
    o = softmax(record["mask"], *heads_of(module, x, "query", "key", "value"))
    expected = module.out(o.transpose(1, 2).flatten(-2))
    same(y, expected, (x, *module.parameters()))


def test_of_equal_scores_the_first_are_kept():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])[None, None]
    allowed = torch.tensor([[True] * 5, [False, True, True, False, True]])
    mask = select.largest(logits, allowed, 2)[0, 0].long().tolist()
    assert mask == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]
    assert select.largest(logits, allowed, 4)[0, 0].long().tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 0, 1]]


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
