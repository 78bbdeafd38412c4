"""Linear attention from plain operations: for short sequences, and for higher derivatives."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import zero_masked
from . import recurrence
from .features import MAPS, divisors


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    causal: bool,
    feature_map: str,
    eps: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention as in ``causal``, from operations with derivatives of any order."""
    with torch.autocast(q.device.type, enabled=False):
        fq, fk, values = _mapped(q, k, v, feature_map, mask)
        if not causal and segments is None:
            sums, keys = fk.mT @ values, fk.sum(-2)[..., None]
            return ((fq @ sums) / divisors(fq @ keys + eps)).to(v.dtype), torch.cat([sums, keys], -1)
        values = F.pad(values, (0, 1), value=1.0)
        if causal:
            read, state = recurrence.scan(fq, fk, values, state, segments=segments)
        else:
            read, state = recurrence.total(fq, fk, values, segments)
        return (read[..., :-1] / divisors(read[..., -1:] + eps)).to(v.dtype), state


def _mapped(q: Tensor, k: Tensor, v: Tensor, feature_map: str, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    phi, wide = MAPS[feature_map], torch.promote_types(q.dtype, torch.float32)
    fq, fk, values = phi(q.to(wide)), phi(k.to(wide)), v.to(wide)
    if mask is not None:
        # phi(0) is not 0, so padding is removed after the feature map, not before.
        fk, values = zero_masked(mask, fk, values)
    return fq, fk, values


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    feature_map: str,
    eps: float,
    mask: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Linear attention from the full matrix of products; arguments as in ``causal.attend``."""
    with torch.autocast(q.device.type, enabled=False):
        fq, fk, values = _mapped(q, k, v, feature_map, mask)
        weights, read, written = (fq @ fk.mT).tril(), fq, fk
        if segments is not None:
            weights = weights * (segments[:, None, :, None] == segments[:, None, None, :])
            read = fq * (segments == segments[:, :1])[:, None, :, None]
            written = fk * (segments == segments[:, -1:])[:, None, :, None]
        above, below = weights @ values, weights.sum(-1, keepdim=True)
        end = torch.cat([written.mT @ values, written.sum(-2)[..., None]], -1)
        if state is not None:
            above, below = above + read @ state[..., :-1], below + read @ state[..., -1:]
            if segments is not None:
                state = state * (segments[:, :1] == segments[:, -1:]).all(-1)[:, None, None, None]
            end = end + state
        return (above / divisors(below + eps)).to(v.dtype), end
