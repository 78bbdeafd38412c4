"""sum_d a_id b_jd e^(G_id - G_jd) for all j <= i of a chunk, where the decay differs by channel, without overflow.

For a token i of the second half of a block and a token j of its first half, with m the last token of the first,
e^(G_i - G_j) = e^(G_i - G_m) e^(G_m - G_j), and neither exponent is positive. So a block is one product of matrices,
[a e^(G - G_m)] [b e^(G_m - G)]^T, and the same holds inside each half, down to single tokens. Nothing is clipped and
no bound on the decay is needed; blocks of the same size are one batched product. Both exponents are sums of the log
decays of one half, and sums of a block are made of those of its halves: no difference of sums is ever taken, so none
loses its digits.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import needs_autograd
from .decays import faded


def halved(a: Tensor, b: Tensor, log_decays: Tensor) -> Tensor:
    """a, b and the log decays (...,C,D) of the tokens, C a power of two -> (...,C,C), 0 above the diagonal."""
    diagonal = (a * b).sum(-1).expand(log_decays.shape[:-1])
    if needs_autograd(a, b, log_decays):
        return _joined_blocks(diagonal, a, b, log_decays)
    out = torch.diag_embed(diagonal)
    for size, risen, fallen in _fades(log_decays):
        rows, columns = _halves(a, size)[..., 1, :, :] * risen, _halves(b, size)[..., 0, :, :] * fallen
        _blocks(out, size).copy_(rows @ columns.mT)
    return out


def _joined_blocks(diagonal: Tensor, a: Tensor, b: Tensor, log_decays: Tensor) -> Tensor:
    """The same, with nothing written in place: two blocks (...,s,s) side by side become one of twice their size."""
    blocks = diagonal[..., None, None]  # (...,C,1,1)
    for size, risen, fallen in _fades(log_decays):
        rows, columns = _halves(a, size)[..., 1, :, :] * risen, _halves(b, size)[..., 0, :, :] * fallen
        first, second = F.pad(blocks[..., ::2, :, :], (0, size)), blocks[..., 1::2, :, :]
        blocks = torch.cat([first, torch.cat([rows @ columns.mT, second], -1)], -2)
    return blocks[..., 0, :, :]


def halved_backward(grad: Tensor, a: Tensor, b: Tensor, log_decays: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients (...,C,D) of a, b and the log decays from that of ``halved``; not read above the diagonal.

    The decay of token t lies between the pairs j < t <= i. Where the halves of a block meet, these are its rows from t
    on, or its columns before t: sums of what is wanted alone, without a difference of large ones.
    """
    diagonal = grad.diagonal(dim1=-2, dim2=-1)[..., None]
    da, db = diagonal * b, diagonal * a
    decay = torch.zeros_like(da)
    for size, risen, fallen in _fades(log_decays):
        rows, columns = _halves(a, size)[..., 1, :, :], _halves(b, size)[..., 0, :, :]
        block = _blocks(grad, size)
        later, earlier = risen * (block @ (columns * fallen)), fallen * (block.mT @ (rows * risen))
        _halves(da, size)[..., 1, :, :] += later
        _halves(db, size)[..., 0, :, :] += earlier
        _halves(decay, size)[..., 1, :, :] += from_here_on(rows * later)
        _halves(decay, size)[..., 0, :, :] += before_here(columns * earlier)
    return da, db, decay


def running(log_decays: Tensor) -> tuple[Tensor, Tensor]:
    """Log decays (...,C,D) -> their sums up to each token, and those after it."""
    until, after = log_decays.clone(), torch.zeros_like(log_decays)
    for size in _sizes(log_decays):
        until, after = _joined(until, after, size)
    return until, after


def _fades(log_decays: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For blocks of two halves of s = 1, 2, 4 ... tokens: s, e^(G_i - G_m) and e^(G_m - G_j), (...,C/2s,s,D)."""
    until, after = log_decays.clone(), torch.zeros_like(log_decays)
    for size in _sizes(log_decays):
        risen, fallen = _halves(until, size)[..., 1, :, :], _halves(after, size)[..., 0, :, :]
        yield size, faded(risen.clone()), faded(fallen.clone())
        until, after = _joined(until, after, size)


def _sizes(log_decays: Tensor) -> list[int]:
    return [1 << i for i in range((log_decays.shape[-2] - 1).bit_length())]


def _joined(until: Tensor, after: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sums inside blocks of ``size`` -> those inside blocks of twice that, in the same memory where none needs it."""
    (first, second), (earlier, later) = _halves(until, size).unbind(-3), _halves(after, size).unbind(-3)
    if needs_autograd(until):
        joined = [first, second + first[..., -1:, :]], [earlier + second[..., -1:, :], later]
        return tuple(torch.stack(pair, -3).flatten(-4, -2) for pair in joined)  # type: ignore[return-value]
    earlier += second[..., -1:, :]
    second += first[..., -1:, :]
    return until, after


def from_here_on(x: Tensor) -> Tensor:
    """x (...,C,D) -> y_t = sum of x_i with i >= t."""
    return x.flip(-2).cumsum(-2).flip(-2)


def before_here(x: Tensor) -> Tensor:
    """x (...,C,D) -> y_t = sum of x_j with j < t."""
    return F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def _halves(x: Tensor, size: int) -> Tensor:
    """(...,C,D) -> (...,C/2s,2,s,D)."""
    return x.unflatten(-2, (-1, 2, size))


def _blocks(x: Tensor, size: int) -> Tensor:
    """(...,C,C) -> (...,C/2s,s,s): where the second half of a block of 2s tokens meets its first; a view."""
    rows = _halves(x, size)[..., 1, :, :].unflatten(-1, (-1, 2, size))[..., 0, :]  # (...,M,s,M,s)
    return rows.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
