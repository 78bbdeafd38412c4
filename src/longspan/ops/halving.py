"""sum_d a_id b_jd e^(G_id - G_jd) for all j <= i of a chunk, where the decay differs by channel, without overflow.

For a token i of the second half of a block and a token j of its first half, with m the last token of the first,
e^(G_i - G_j) = e^(G_i - G_m) e^(G_m - G_j), and neither exponent is positive. So a block is one product of matrices,
[a e^(G - G_m)] [b e^(G_m - G)]^T, and the same holds inside each half, down to single tokens. Nothing is clipped and
no bound on the decay is needed; blocks of the same size are one batched product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrence import faded


def halved(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """a, b and G = total (...,C,D), which never rises along C, a power of two -> (...,C,C), 0 above the diagonal."""
    size = a.shape[-2]
    out = torch.diag_embed((a * b).sum(-1).expand(total.shape[:-1]))
    while size := size // 2:
        rows, columns, _, _ = _sides(a, b, total, size)
        _blocks(out, size).copy_(rows @ columns.mT)
    return out


def halved_backward(grad: Tensor, a: Tensor, b: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients (...,C,D) of a, b and the log decays from that of ``halved``; not read above the diagonal.

    The decay of token t lies between the pairs j < t <= i. Where the halves of a block meet, these are its rows from t
    on, or its columns before t: sums of what is wanted alone, without a difference of large ones.
    """
    size = a.shape[-2]
    diagonal = grad.diagonal(dim1=-2, dim2=-1)[..., None]
    da, db = diagonal * b, diagonal * a
    decay = torch.zeros_like(da)
    while size := size // 2:
        rows, columns, risen, fallen = _sides(a, b, total, size)
        block = _blocks(grad, size)
        later, earlier = risen * (block @ columns), fallen * (block.mT @ rows)
        _halves(da, size)[..., 1, :, :] += later
        _halves(db, size)[..., 0, :, :] += earlier
        _halves(decay, size)[..., 1, :, :] += from_here_on(_halves(a, size)[..., 1, :, :] * later)
        _halves(decay, size)[..., 0, :, :] += before_here(_halves(b, size)[..., 0, :, :] * earlier)
    return da, db, decay


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


def _sides(a: Tensor, b: Tensor, total: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both factors of the product of a block, (...,C/2s,s,D), and by what e^G multiplied each."""
    halves = _halves(total, size)
    middle = halves[..., 0, -1:, :]
    risen = faded((halves[..., 1, :, :] - middle).to(a.dtype))
    fallen = faded((middle - halves[..., 0, :, :]).to(b.dtype))
    return _halves(a, size)[..., 1, :, :] * risen, _halves(b, size)[..., 0, :, :] * fallen, risen, fallen
