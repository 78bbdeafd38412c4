"""Sums over segments of tokens, each of which is added as one: what Infini-attention's memory holds before each."""

import torch
from torch import Tensor

from ..backends import select_backend
from ..tensors import upcast_half, with_ones
from . import normalize
from .features import elu


def memories(
    k: Tensor, v: Tensor, real: Tensor | None, before: Tensor, recent: Tensor, *, delta: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """What was there before each segment and after the last, and what each adds.

    k (B,H,G,L,D), v (B,H,G,L,E), real bool (B,1,G,L,1) or None, before and recent (B,H,D,E+1), the latter being what
    the first segment has added in earlier calls -> (B,H,G+1,D,E+1), (B,H,G,D,E+1). Last columns are of normalizers.

    ``delta``: a segment adds what its values differ by from what their keys read. Then there is a loop over segments.

    Source: Munkhdalai et al. 2024 (2404.07143), eqs 3-5.
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
    """What queries read of a memory, 0 of an empty one: q (...,L,D), sums (...,D,E+1) -> (...,L,E), of wide type."""
    with torch.autocast(q.device.type, enabled=False):
        return normalize(elu(upcast_half(q)) @ sums, eps)
