"""Attention to picked tokens and the choice of them, in every form, against loops."""

import pytest
import torch

from longspan import backend, ops
from longspan.ops.native.call import available
from longspan.ops.softmax.dense import repeat
from longspan.ops.sparse import chosen, picked
from support.tensors import close, data, same

compiled = pytest.mark.skipif(not available("pattern/picked"), reason="no compiler")
FORMS = ["torch", pytest.param("native", marks=compiled)]
# batch, heads, heads of keys, queries, keys, D, E, picks
CASES = [
    (2, 4, 2, 29, 29, 5, 7, 6),
    (1, 3, 1, 70, 90, 9, 17, 70),
    (2, 2, 2, 2, 31, 4, 3, 5),
    (1, 18, 1, 3, 5, 1, 1, 5),
    (3, 6, 3, 31, 13, 17, 2, 9),
]


def operands(case, dtype):
    batch, heads, groups, n, m, dim, width, picks = case
    q, k, v = data(batch, heads, n, dim), data(batch, groups, m, dim, seed=1), data(batch, groups, m, width, seed=2)
    index = torch.rand(batch, n, m, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :picks]
    # The first query picks nothing, and others fewer tokens.
    gaps = torch.rand(index.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    gaps[:, 0] = True
    return [x.to(dtype).requires_grad_() for x in (q, k, v)], index.masked_fill(gaps, -1)


def attend(q, k, v, index):
    at = torch.full(index.shape[:2], k.shape[2])
    return chosen.attend(q, k, v, at, index[:, None], 1)


def by_hand(q, k, v, index):
    k, v = (repeat(x, q.shape[1]) for x in (k, v))
    out = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [int(s) for s in index[b, i] if s >= 0]
                p = (q[b, h, i] @ k[b, h, keys].mT * q.shape[-1] ** -0.5).softmax(-1)
                out.append(p @ v[b, h, keys] if keys else v[b, h, 0] * 0)
    return torch.stack(out).view(*q.shape[:3], -1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_softmax_over_the_picked_tokens(case, form):
    tensors, index = operands(case, torch.float32 if form == "native" else torch.float64)
    with backend(form), ops.watch() as seen:
        found = attend(*tensors, index)
    assert [use.backend for use in seen] == [form]
    if form == "torch":
        same(found, by_hand(*tensors, index), tensors)
        return
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = by_hand(*wide, index)
    close(found.double(), expected, 1e-5)
    up = data(*found.shape, seed=4)
    for a, b in zip(
        torch.autograd.grad(found, tensors, up.float()), torch.autograd.grad(expected, wide, up), strict=True
    ):
        close(a.double(), b, 1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "m", "picks"), [(29, 29, 5), (40, 150, 20), (1, 31, 40), (2, 1800, 600)])
def test_the_largest_scores_are_chosen_and_of_equal_ones_the_first(n, m, picks, form):
    """Small whole numbers, so that there are many equal scores, and all are exact."""
    whole = [
        torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(s)).float()
        for s, shape in enumerate([(2, n, 3, 4), (2, m, 4), (2, n, 3)])
    ]
    q, k, weights = whole
    at = m - n + torch.arange(n).expand(2, -1) - torch.tensor([[0], [m - n]])
    with backend(form):
        found = picked.choose(q, k, weights, at, picks)
    for b in range(2):
        for i in range(n):
            score = [float(weights[b, i] @ (q[b, i] @ k[b, s]).relu()) for s in range(int(at[b, i]) + 1)]
            best = sorted(range(len(score)), key=lambda s, score=score: (-score[s], s))[:picks]
            assert [s for s in found[b, i].tolist() if s >= 0] == sorted(best)


def test_second_derivatives_are_those_of_the_definition():
    tensors, index = operands(CASES[2], torch.float64)

    def gradients(form):
        with backend(form):
            first = torch.autograd.grad(attend(*tensors, index).square().sum(), tensors, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    for a, b in zip(gradients("torch"), gradients("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
