"""sum_d a_id b_jd e^(G_id - G_jd) for all j <= i of a chunk with a decay per channel, without overflow.

Let i be a token in the second half of a block, j a token in its first half, and m the last token of the first half.
Then e^(G_i - G_j) = e^(G_i - G_m) e^(G_m - G_j), and neither exponent is positive. So a block is one matrix product,
[a e^(G - G_m)] [b e^(G_m - G)]^T. The same holds inside each half, down to single tokens. Nothing is clipped, the decay
needs no bound, and blocks of one size form one batched product. Both exponents are sums of the log decays of one half,
and the sums of a block are built from those of its halves. No difference of sums is taken, so no digits are lost.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import needs_autograd
from .decays import faded


def halved(a: Tensor, b: Tensor, log_decays: Tensor) -> Tensor:
    """Return the sums: a, b, log decays (...,C,D), C a power of two -> (...,C,C), 0 above the diagonal."""
    diagonal = (a * b).sum(-1).expand(log_decays.shape[:-1])
    if needs_autograd(a, b, log_decays):
        return _joined_blocks(diagonal, a, b, log_decays)
    out = torch.diag_embed(diagonal)
    for size, risen, fallen in _fades(log_decays):
        rows, columns = _halves(a, size)[..., 1, :, :] * risen, _halves(b, size)[..., 0, :, :] * fallen
        lower_blocks(out, size).copy_(rows @ columns.mT)
    return out


def _joined_blocks(diagonal: Tensor, a: Tensor, b: Tensor, log_decays: Tensor) -> Tensor:
    """``halved`` without in-place writes: two adjacent blocks (...,s,s) become one of twice their size."""
    blocks = diagonal[..., None, None]  # (...,C,1,1)
    for size, risen, fallen in _fades(log_decays):
        rows, columns = _halves(a, size)[..., 1, :, :] * risen, _halves(b, size)[..., 0, :, :] * fallen
        first, second = F.pad(blocks[..., ::2, :, :], (0, size)), blocks[..., 1::2, :, :]
        blocks = torch.cat([first, torch.cat([rows @ columns.mT, second], -1)], -2)
    return blocks[..., 0, :, :]


def halved_backward(grad: Tensor, a: Tensor, b: Tensor, log_decays: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (...,C,D) of a, b and the log decays, given that of ``halved`` on and below the diagonal.

    The decay of token t affects the pairs j < t <= i. In the product of two halves these are the rows from t on, or
    the columns before t. Summing only these avoids a difference of large sums.
    """
    diagonal = grad.diagonal(dim1=-2, dim2=-1)[..., None]
    da, db = diagonal * b, diagonal * a
    decay = torch.zeros_like(da)
    for size, risen, fallen in _fades(log_decays):
        rows, columns = _halves(a, size)[..., 1, :, :], _halves(b, size)[..., 0, :, :]
        block = lower_blocks(grad, size)
        later, earlier = risen * (block @ (columns * fallen)), fallen * (block.mT @ (rows * risen))
        _halves(da, size)[..., 1, :, :] += later
        _halves(db, size)[..., 0, :, :] += earlier
        _halves(decay, size)[..., 1, :, :] += from_here_on(rows * later)
        _halves(decay, size)[..., 0, :, :] += before_here(columns * earlier)
    return da, db, decay


def running(log_decays: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of log decays (...,C,D) up to each token, and after it."""
    until, after = log_decays.clone(), torch.zeros_like(log_decays)
    for size in _sizes(log_decays):
        until, after = _joined(until, after, size)
    return until, after


def _fades(log_decays: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield s, e^(G_i - G_m) and e^(G_m - G_j), (...,C/2s,s,D), for blocks of two halves of s = 1, 2, 4 ... tokens."""
    until, after = log_decays.clone(), torch.zeros_like(log_decays)
    for size in _sizes(log_decays):
        risen, fallen = _halves(until, size)[..., 1, :, :], _halves(after, size)[..., 0, :, :]
        yield size, faded(risen.clone()), faded(fallen.clone())
        until, after = _joined(until, after, size)


def _sizes(log_decays: Tensor) -> list[int]:
    return [1 << i for i in range((log_decays.shape[-2] - 1).bit_length())]


def _joined(until: Tensor, after: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Turn sums in blocks of ``size`` into sums in blocks of twice that, in place if autograd permits it."""
    (first, second), (earlier, later) = _halves(until, size).unbind(-3), _halves(after, size).unbind(-3)
    if needs_autograd(until):
        joined = [first, second + first[..., -1:, :]], [earlier + second[..., -1:, :], later]
        until, after = (torch.stack(pair, -3).flatten(-4, -2) for pair in joined)
        return until, after
    earlier += second[..., -1:, :]
    second += first[..., -1:, :]
    return until, after


def from_here_on(x: Tensor) -> Tensor:
    """Return y_t = sum of x_i with i >= t, x (...,C,D)."""
    return x.flip(-2).cumsum(-2).flip(-2)


def before_here(x: Tensor) -> Tensor:
    """Return y_t = sum of x_j with j < t, x (...,C,D)."""
    return F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def _halves(x: Tensor, size: int) -> Tensor:
    """Split into halves of blocks: (...,C,D) -> (...,C/2s,2,s,D)."""
    return x.unflatten(-2, (-1, 2, size))


def lower_blocks(x: Tensor, size: int) -> Tensor:
    """View the products of second and first halves of blocks of 2s tokens: (...,C,C) -> (...,C/2s,s,s)."""
    rows = _halves(x, size)[..., 1, :, :].unflatten(-1, (-1, 2, size))[..., 0, :]  # (...,M,s,M,s)
    return rows.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
