"""Padded and packed rows moved, cut and put back, and that no two sequences are taken for one."""

import pytest
import torch

import longspan
from longspan.ops import rows

N = 11
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
SEGMENTS = torch.tensor([[0] * 4 + [3] * 5 + [7] * 2, [1] * 11])
X = torch.arange(2.0 * N).view(2, N, 1)


@pytest.mark.parametrize("axis", [1, 2])
def test_real_tokens_go_to_the_front_and_back(axis):
    x = X.expand(-1, -1, 3).movedim(1, axis)
    (moved,) = rows.gather_valid(MASK, x, axis=axis)
    assert moved.movedim(axis, 1)[0, :9, 0].tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10]
    assert moved.movedim(axis, 1)[1, :10, 0].tolist() == list(range(12, 22))
    again = rows.scatter_back(MASK, moved, axis=axis)
    assert again.movedim(axis, 1)[MASK].equal(x.movedim(axis, 1)[MASK])
    assert rows.gather_valid(None, x)[0] is x
    assert rows.scatter_back(None, x) is x


@pytest.mark.parametrize("exact", [True, False])
def test_sequences_are_numbered_row_by_row(exact):
    seen = {}

    def run(number, tokens):
        seen.update(zip(number.tolist(), tokens[..., 0].tolist(), strict=True))
        return tokens * 2

    y = rows.cut(run, (X,), X, MASK, SEGMENTS, exact=exact)
    sequences = {0: [0, 1, 2], 1: [5, 6, 7, 8], 2: [9, 10], 3: [float(i) for i in range(12, 22)]}
    assert {number: seen[number][: len(tokens)] for number, tokens in sequences.items()} == sequences
    assert len(seen) == 4
    assert not exact or seen == sequences
    assert y.equal(2 * X * MASK[..., None])


@pytest.mark.parametrize("segments", [None, torch.zeros(2, N).long(), torch.tensor([[0] * N, [-1] * N])])
def test_two_rows_are_two_sequences(segments):
    lengths = []

    def run(number, tokens):
        lengths.append(tokens.shape)
        return tokens

    assert rows.cut(run, (X,), X, None, segments, exact=True).equal(X)
    assert lengths == [(2, N, 1)]


def test_packed_rows_with_negative_ids_do_not_see_each_other():
    x = torch.randn(2, N, 8, generator=torch.Generator().manual_seed(0))
    module = longspan.build("local(window=3)", 8, 2)
    y = module(x, segments=torch.tensor([[0] * N, [-1] * N]))[0]
    torch.testing.assert_close(y, module(x)[0])


def test_the_first_sequence_goes_on_with_the_state_and_the_last_leaves_it():
    def run(x, state, real):
        total = state[0][:, None] + (x * real[..., None]).cumsum(1)
        return total, (total[:, -1],)

    y, (after,) = rows.split_packed(run, X, (torch.tensor([[100.0], [1000.0]]),), MASK, SEGMENTS)
    assert y[0, :, 0].tolist() == [100, 101, 103, 0, 0, 5, 11, 18, 26, 9, 19]
    assert y[1, 1:3, 0].tolist() == [1012, 1025]
    assert after.tolist() == [[19], [1000 + sum(range(12, 22))]]


@pytest.mark.parametrize("exact", [True, False])
def test_padding_alone_has_gradients_of_zeros(exact):
    """Without them, a process whose tokens are all padding would leave out the exchanges of a backward pass."""
    x = X.clone().requires_grad_()
    y = rows.cut(lambda number, tokens: tokens, (x,), x, torch.zeros_like(MASK), None, exact=exact)
    y.sum().backward()
    assert y.eq(0).all()
    assert x.grad.eq(0).all()
