"""Attention to chosen blocks of keys or picked tokens, and the choice of tokens, in every form, against loops."""

import pytest
import torch

from longspan import backend, ops
from longspan.ops.native.call import available
from longspan.ops.softmax.dense import repeat
from longspan.ops.sparse import chosen, picked
from support.tensors import close, data, same

# batch, heads, heads of keys, heads that choose, queries, keys, D, E, keys of a block, blocks per query
BLOCKS = [
    (2, 4, 2, 4, 29, 29, 5, 7, 4, 3),
    (1, 4, 2, 2, 29, 29, 5, 5, 7, 2),
    (1, 4, 2, 1, 29, 29, 5, 5, 3, 4),
    (2, 2, 2, 2, 3, 31, 4, 3, 5, 2),
    (1, 2, 1, 1, 211, 300, 9, 17, 140, 2),
    (1, 1, 1, 1, 5, 5, 1, 1, 1, 5),
]
# Tokens are blocks of one key, the same for all heads, and may be later ones.
TOKENS = [
    (2, 4, 2, 1, 29, 29, 5, 7, 1, 6),
    (1, 3, 1, 1, 70, 90, 9, 17, 1, 70),
    (2, 2, 2, 1, 2, 31, 4, 3, 1, 5),
    (1, 18, 1, 1, 3, 5, 1, 1, 1, 5),
    (3, 6, 3, 1, 31, 13, 17, 2, 1, 9),
]
compiled = pytest.mark.skipif(not available("pattern/chosen") or not available("pattern/picked"), reason="no compiler")
FORMS = ["torch", pytest.param("native", marks=compiled)]


def operands(case, dtype):
    batch, heads, groups, choosers, n, m, dim, width, size, picks = case
    q, k, v = data(batch, heads, n, dim), data(batch, groups, m, dim, seed=1), data(batch, groups, m, width, seed=2)
    generator, leaves = torch.Generator().manual_seed(3), [x.to(dtype).requires_grad_() for x in (q, k, v)]
    if case in TOKENS:
        index = torch.rand(batch, 1, n, m, generator=generator).argsort(-1)[..., :picks]
        # The first query picks nothing, and others fewer tokens.
        gaps = torch.rand(index.shape, generator=generator) < 0.3
        gaps[:, :, 0] = True
        return leaves, torch.full((batch, n), m), index.masked_fill(gaps, -1), size
    # Rows of different lengths, whose last queries are beyond the keys, as masked ones are.
    at = m - n + torch.arange(n).expand(batch, n) + torch.arange(batch)[:, None]
    order = torch.rand(batch, choosers, n, -(-m // size) + 2, generator=generator).argsort(-1)
    return leaves, at, order[..., :picks] - 1, size  # -1 and one block beyond the last: no block


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
@pytest.mark.parametrize("case", [*BLOCKS, *TOKENS], ids=str)
def test_it_is_softmax_over_the_keys_of_the_blocks(case, form):
    tensors, at, blocks, size = operands(case, torch.float32 if form == "native" else torch.float64)
    with backend(form), ops.watch() as seen:
        found = chosen.attend(*tensors, at, blocks, size)
    assert [use.backend for use in seen] == [form]
    if form == "torch":
        same(found, by_hand(*tensors, at, blocks, size), tensors)
        return
    wide, up = [t.detach().double().requires_grad_() for t in tensors], data(*found.shape, seed=4)
    expected = by_hand(*wide, at, blocks, size)
    close(found.double(), expected, 1e-5)
    grads = torch.autograd.grad(found, tensors, up.float()), torch.autograd.grad(expected, wide, up)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [BLOCKS[2], TOKENS[2]], ids=["blocks", "tokens"])
def test_second_derivatives_are_those_of_the_definition(case):
    tensors, at, blocks, size = operands(case, torch.float64)

    def gradients(form):
        with backend(form):
            y = chosen.attend(*tensors, at, blocks, size)
            first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    for a, b in zip(gradients("torch"), gradients("reference"), strict=True):
        close(a, b, 1e-9)


def test_no_tensor_has_all_pairs():
    tensors, at, blocks, size = operands((1, 2, 2, 2, 512, 512, 4, 4, 8, 2), torch.float64)
    kept = []
    with backend("torch"), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chosen.attend(*tensors, at, blocks, size)
    assert max(kept) < 512 * 512 // 8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "m", "picks"), [(29, 29, 5), (40, 150, 20), (1, 31, 40), (2, 1800, 600)])
def test_the_largest_scores_are_chosen_and_of_equal_ones_the_first(n, m, picks, form):
    """Small whole numbers, so that there are many equal scores, and all are exact."""
    q, k, weights = (
        torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(s)).float()
        for s, shape in enumerate([(2, n, 3, 4), (2, m, 4), (2, n, 3)])
    )
    at = m - n + torch.arange(n).expand(2, -1) - torch.tensor([[0], [m - n]])
    with backend(form):
        found = picked.choose(q, k, weights, at, picks)
    for b in range(2):
        for i in range(n):
            score = [float(weights[b, i] @ (q[b, i] @ k[b, s]).relu()) for s in range(int(at[b, i]) + 1)]
            best = sorted(range(len(score)), key=lambda s, score=score: (-score[s], s))[:picks]
            assert [s for s in found[b, i].tolist() if s >= 0] == sorted(best)
