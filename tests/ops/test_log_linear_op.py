"""Log-linear attention against its definition over all pairs, with states and masks."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from longspan.ops.gated import log_linear

B, G, H, D, E = 2, 2, 4, 3, 5


def inputs(n, levels, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(B, G, n, D), draw(B, G, n, D), draw(B, H, n, E)
    return q, k, v, F.softplus(draw(B, H, n, levels)), -0.1 * F.softplus(draw(B, H, n))


def definition(q, k, v, weights, log_decay):
    """The sum over all pairs, pair by pair."""
    n, levels = q.shape[2], weights.shape[-1]
    q, k = (t.repeat_interleave(H // G, 1) for t in (q, k))
    out = torch.zeros_like(v)
    for t in range(n):
        for s in range(t + 1):
            level = min((t ^ s).bit_length(), levels - 1)
            decay = log_decay[:, :, s + 1 : t + 1].sum(-1).exp()
            factor = weights[:, :, t, level] * decay * (q[:, :, t] * k[:, :, s]).sum(-1) / D**0.5
            out[:, :, t] += factor[..., None] * v[:, :, s]
    return out


def call(given, state=None, **options):
    q, k, v, weights, log_decay = given
    return log_linear.attend(q, k, v, weights, log_decay=log_decay, state=state, **options)


def part(given, *index):
    return [t[:, :, slice(*index)] for t in given]


def fresh(levels):
    return log_linear.start(torch.zeros(0, dtype=torch.float64), B, levels, H, D, E)


@pytest.mark.whole
@pytest.mark.parametrize(("n", "levels"), [(1, 3), (29, 7), (33, 4), (16, 2)])
def test_is_the_sum_over_pairs(n, levels):
    given = inputs(n, levels)
    torch.testing.assert_close(call(given)[0], definition(*given))


@pytest.mark.whole
@pytest.mark.parametrize("levels", [2, 3, 4, 7])
@pytest.mark.parametrize("cuts", [(0, 5, 6, 18, 29), (0, 16, 29), (0, 1, 2, 3, 9, 29), tuple(range(30))])
def test_parts_equal_the_whole(levels, cuts):
    given = inputs(29, levels)
    state, outs = fresh(levels), []
    for first, last in pairwise(cuts):
        o, state = call(part(given, first, last), state)
        outs.append(o)
    torch.testing.assert_close(torch.cat(outs, 2), definition(*given))
    assert state[1].tolist() == [29, 29]
    whole = call(given, fresh(levels))[1]
    torch.testing.assert_close(state[0], whole[0])


def test_sums_of_unset_bits_are_zero():
    _, (sums, _) = call(inputs(22, 6), fresh(6))  # 22 = 10110, and the last sum holds the tokens before the 16th
    assert [bool(sums[:, j].any()) for j in range(5)] == [False, True, True, False, True]


@pytest.mark.parametrize("n", [1, 13])
def test_masked_tokens_do_not_exist(n):
    given = inputs(20, 6)
    first = part(given, 0, 7)
    mask = torch.ones(B, n, dtype=torch.bool)
    mask[0, 2::3] = False
    mask[1, -3:] = False
    new = part(given, 7, 7 + n)
    out, state = call(new, call(first, fresh(6))[1], mask=mask)
    for row in range(B):
        real = mask[row].nonzero()[:, 0]
        alone = [torch.cat([a[row : row + 1], b[row : row + 1, :, real]], 2) for a, b in zip(first, new, strict=True)]
        expected = definition(*alone)[:, :, 7:]
        torch.testing.assert_close(out[row : row + 1, :, real], expected)
        assert not out[row, :, ~mask[row]].any()
        assert state[1][row] == 7 + len(real)
    more = part(inputs(9, 6, seed=1), 0, 9)
    got, _ = call(more, state)
    real = mask[1]
    alone = [torch.cat([a[1:], b[1:, :, real], c[1:]], 2) for a, b, c in zip(first, new, more, strict=True)]
    torch.testing.assert_close(got[1:], definition(*alone)[:, :, -9:])
