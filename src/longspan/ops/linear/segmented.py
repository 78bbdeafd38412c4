"""Sums over segments of tokens, each added as a whole: the memory of Infini-attention before each segment."""

import torch
from torch import Tensor

from ..backends import select_backend
from ..tensors import upcast_half, with_ones
from . import normalize
from .features import elu


def memories(
    k: Tensor, v: Tensor, real: Tensor | None, before: Tensor, recent: Tensor, *, delta: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the memory before each segment and after the last, and the sum that each segment adds.

    Args:
        k: (B,H,G,L,D), G segments of L tokens.
        v: (B,H,G,L,E).
        real: (B,1,G,L,1) bool, the real tokens; None for all.
        before: (B,H,D,E+1), the memory before the first segment.
        recent: (B,H,D,E+1), the sum that the first segment has added in earlier calls.
        delta: Adds the difference between values and the memory's values for their keys, in a loop over segments.
        eps: Added to the denominator.

    Returns:
        The memories (B,H,G+1,D,E+1) and the sums (B,H,G,D,E+1). The last column holds the normalizers.

    References:
        Munkhdalai et al. 2024 (2404.07143), eqs 3-5.
    """
    with torch.autocast(k.device.type, enabled=False):
        k, v = elu(upcast_half(k)), upcast_half(v)
        if real is not None:
            k = k * real
        if not delta and select_backend("sums over segments") != "reference":
            own = k.mT @ with_ones(v)
            own = torch.cat([own[:, :, :1] + recent[:, :, None], own[:, :, 1:]], 2)
            return torch.cat([before[:, :, None], before[:, :, None] + own.cumsum(2)], 2), own
        sums, own = [before], []
        for g in range(k.shape[2]):
            new = v[:, :, g] - normalize(k[:, :, g] @ sums[-1], eps) if delta else v[:, :, g]
            own.append(k[:, :, g].mT @ with_ones(new) + (0 if g else recent))
            sums.append(sums[-1] + own[-1])
        return torch.stack(sums, 2), torch.stack(own, 2) if own else before[:, :, None][:, :, :0]


def read(q: Tensor, sums: Tensor, eps: float) -> Tensor:
    """Read a memory, 0 if it is empty: q (...,L,D), sums (...,D,E+1) -> (...,L,E), in float32 at least."""
    with torch.autocast(q.device.type, enabled=False):
        return normalize(elu(upcast_half(q)) @ sums, eps)
