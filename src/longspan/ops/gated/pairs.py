"""States of many chunks, and inverses of triangles, from products of pairs: few operations, all of them batched.

A loop over chunks costs a GPU several launches per chunk. Joining two chunks into one, S'' = A_2 (A_1 S + P_1) + P_2,
halves their number; so L chunks take 2 log2 L steps, each of one or two products, and about four times the operations
of the loop (Blelloch 1990, "Prefix sums and their applications").
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .decay_per_channel import lower_blocks


def transition(keys: Tensor, w: Tensor, whole: Tensor | None) -> Tensor:
    """Return A = diag(whole) - K^T W: keys and w (...,L,C,D), whole (...,L,1|D,1) or None for 1 -> (...,L,D,D)."""
    erased = keys.mT @ w
    kept = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return (kept if whole is None else kept * whole) - erased


def chain(moves: Tensor | None, parts: Tensor, state: Tensor, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Compute S_l = A_l S_(l-1) + P_l, from the last chunk to the first with ``reverse``.

    Args:
        moves: A, (B,G,R,L,D,D), or its diagonal (...,L,1|D,1). Axes of size 1 may stand for all. None for 1.
        parts: P, (B,G,R,L,D,E).
        state: (B,G,R,D,E).
        reverse: S_(l-1) = A_l S_l + P_l.

    Returns:
        The states before the chunks, or after them with ``reverse``, (B,G,R,L,D,E), and the last one computed.
    """
    if moves is None:
        moves = parts.new_ones(1, 1, 1, parts.shape[3], 1, 1)
    if not reverse:
        return _chain(moves, parts, state)
    states, end = _chain(moves.flip(3), parts.flip(3), state)
    return states.flip(3), end


def _chain(moves: Tensor, parts: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    count, full = parts.shape[3], moves.shape[-1] > 1
    if count == 1:
        return state[:, :, :, None], _moved(moves[:, :, :, 0], state, parts[:, :, :, 0], full)
    # An odd last chunk follows the pairs.
    even = count - count % 2
    first, second = (moves[:, :, :, at:even:2] for at in (0, 1))
    earlier, later = (parts[:, :, :, at:even:2] for at in (0, 1))
    both = second @ first if full else second * first
    before, end = _chain(both, _moved(second, earlier, later, full), state)
    states = torch.stack([before, _moved(first, before, earlier, full)], 4).flatten(3, 4)
    if even < count:
        states = torch.cat([states, end[:, :, :, None]], 3)
        end = _moved(moves[:, :, :, -1], end, parts[:, :, :, -1], full)
    return states, end


def _moved(moves: Tensor, state: Tensor, part: Tensor, full: bool) -> Tensor:
    """Return A S + P, where A is a matrix or, unless ``full``, a diagonal."""
    return part + moves @ state if full else torch.addcmul(part, moves, state)


def inverted(triangle: Tensor) -> Tensor:
    """Return T^-1 (...,C,C), where T has ones on the diagonal and, below it, the entries of ``triangle`` (...,C,C).

    C is a power of two. [A 0; X B]^-1 = [A^-1 0; -B^-1 X A^-1 B^-1] makes an inverse from those of its halves, from
    single tokens up. Its error is that of substitution, which solves the same equations in another order.
    """
    width = triangle.shape[-1]
    blocks = triangle.new_ones(1).expand(*triangle.shape[:-1])[..., None, None]  # (...,C,1,1)
    below = -triangle
    for size in [1 << i for i in range((width - 1).bit_length())]:
        first, second = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
        lower = lower_blocks(below, size)
        lower = lower if size == 1 else second @ (lower @ first)
        blocks = torch.cat([F.pad(first, (0, size)), torch.cat([lower, second], -1)], -2)
    return blocks[..., 0, :, :]
