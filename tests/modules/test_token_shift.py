"""The token shift: the token before each, over masks, packed rows and calls."""

import torch

from longspan.modules.token_shift import shift, shift_start

X = torch.arange(1.0, 13.0).view(2, 6, 1)


def shifted(x, last, **options):
    before, last = shift(x, torch.tensor(last)[:, None, None], **options)
    return before[..., 0].tolist(), last[:, 0, 0].tolist()


def test_the_token_before():
    assert shifted(X, [0.5, 0.0]) == ([[0.5, 1, 2, 3, 4, 5], [0, 7, 8, 9, 10, 11]], [6, 12])
    assert shifted(X[:, :0], [0.5, 0.0]) == ([[], []], [0.5, 0])


def test_masked_tokens_are_skipped():
    mask = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
    before, last = shifted(X, [0.5, 0.25], mask=mask)
    assert (before[0][1], before[0][4]) == (0.5, 2)
    assert last == [5, 0.25]


def test_packed_rows_start_anew():
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    before, last = shifted(X, [0.5, 0.25], segments=segments)
    assert before == [[0.5, 1, 0, 3, 4, 0], [0.25, 7, 8, 9, 10, 11]]
    assert last == [6, 12]


def test_half_precision_states_are_wide():
    start = shift_start(X.bfloat16(), 3, 5)
    assert (start.shape, start.dtype) == ((3, 1, 5), torch.float32)
    for segments in (None, torch.zeros(2, 6, dtype=torch.long)):
        before, last = shift(X.bfloat16(), shift_start(X, 2, 1), segments=segments)
        assert (before.dtype, last.dtype) == (torch.bfloat16, torch.float32)


def test_gradients_reach_the_token_before():
    for segments in (None, torch.zeros(2, 6, dtype=torch.long)):
        x, last = X.clone().requires_grad_(), torch.zeros(2, 1, 1, requires_grad=True)
        before, after = shift(x, last, segments=segments)
        weights = torch.arange(6.0)[None, :, None]
        ((weights + 1) * before).sum().backward()
        assert x.grad is not None
        assert last.grad is not None
        assert x.grad[:, :, 0].tolist() == [[2, 3, 4, 5, 6, 0]] * 2
        assert last.grad.flatten().tolist() == [1, 1]
        assert torch.equal(after, x[:, -1:])
