"""Attention to chosen blocks of keys, in every form, against dense attention under the mask of the choice."""

import pytest
import torch

from longspan import backend, ops
from longspan.ops.native.call import available
from longspan.ops.softmax.dense import repeat
from longspan.ops.sparse import chosen
from support.tensors import data, same

# batch, heads, heads of keys, heads that choose, queries, keys, D, E, keys of a block, blocks per query
CASES = [
    (2, 4, 2, 4, 29, 29, 5, 7, 4, 3),
    (1, 4, 2, 2, 29, 29, 5, 5, 7, 2),
    (1, 4, 2, 1, 29, 29, 5, 5, 3, 4),
    (2, 2, 2, 2, 3, 31, 4, 3, 5, 2),
    (1, 2, 1, 1, 211, 300, 9, 17, 140, 2),
    (1, 1, 1, 1, 5, 5, 1, 1, 1, 5),
]
FORMS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not available("pattern/chosen"), reason="no compiler")),
]


def operands(case, dtype):
    batch, heads, groups, choosers, n, m, dim, width, size, picks = case
    q, k, v = data(batch, heads, n, dim), data(batch, groups, m, dim, seed=1), data(batch, groups, m, width, seed=2)
    generator = torch.Generator().manual_seed(3)
    # Rows of different lengths, whose last queries are beyond the keys, as masked ones are.
    at = m - n + torch.arange(n).expand(batch, n) + torch.arange(batch)[:, None]
    order = torch.rand(batch, choosers, n, -(-m // size) + 2, generator=generator).argsort(-1)
    blocks = order[..., :picks] - 1  # -1 and one block beyond the last: no block
    return [x.to(dtype).requires_grad_() for x in (q, k, v)], at, blocks, size


def by_hand(q, k, v, at, blocks, size):
    """A loop over queries, each with the list of its keys."""
    k, v, blocks = (repeat(x, q.shape[1]) for x in (k, v, blocks))
    out = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                own = {int(c) for c in blocks[b, h, i]}
                keys = [j for j in range(k.shape[2]) if j <= at[b, i] and j // size in own]
                p = (q[b, h, i] @ k[b, h, keys].mT * q.shape[-1] ** -0.5).softmax(-1)
                out.append(p @ v[b, h, keys] if keys else v[b, h, 0] * 0)
    return torch.stack(out).view(*q.shape[:3], -1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_softmax_over_the_keys_of_the_blocks(case, form):
    dtype = torch.float32 if form == "native" else torch.float64
    tensors, at, blocks, size = operands(case, dtype)
    with backend(form), ops.watch() as seen:
        found = chosen.attend(*tensors, at, blocks, size)
    assert [use.backend for use in seen] == [form]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = by_hand(*wide, at, blocks, size)
    if form == "torch":
        same(found, by_hand(*tensors, at, blocks, size), tensors)
        return
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    up = data(*found.shape, seed=4)
    for a, b in zip(
        torch.autograd.grad(found, tensors, up.float()), torch.autograd.grad(expected, wide, up), strict=True
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_those_of_the_definition():
    tensors, at, blocks, size = operands(CASES[2], torch.float64)

    def gradients(form):
        with backend(form):
            y = chosen.attend(*tensors, at, blocks, size)
            first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    for a, b in zip(gradients("torch"), gradients("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_no_tensor_has_all_pairs():
    tensors, at, blocks, size = operands((1, 2, 2, 2, 512, 512, 4, 4, 8, 2), torch.float64)
    kept = []
    with backend("torch"), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chosen.attend(*tensors, at, blocks, size)
    assert max(kept) < 512 * 512 // 8
