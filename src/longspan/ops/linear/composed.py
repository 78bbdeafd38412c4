"""Linear attention from plain operations: for short sequences, and for higher derivatives."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import zero_masked
from . import recurrence
from .features import MAPS, divisors
from .operands import LinearOperands


def composed(r: LinearOperands) -> tuple[Tensor, Tensor]:
    """Linear attention from operations with derivatives of any order."""
    segments, state, eps = r.segments, r.state, r.eps
    with torch.autocast(r.q.device.type, enabled=False):
        fq, fk, values = _mapped(r)
        if not r.causal and segments is None:
            sums, keys = fk.mT @ values, fk.sum(-2)[..., None]
            return ((fq @ sums) / divisors(fq @ keys + eps)).to(r.v.dtype), torch.cat([sums, keys], -1)
        values = F.pad(values, (0, 1), value=1.0)
        if r.causal:
            read, state = recurrence.scan(fq, fk, values, state, segments=segments)
        else:
            read, state = recurrence.total(fq, fk, values, segments)
        return (read[..., :-1] / divisors(read[..., -1:] + eps)).to(r.v.dtype), state


def _mapped(r: LinearOperands) -> tuple[Tensor, Tensor, Tensor]:
    phi, wide = MAPS[r.feature_map], torch.promote_types(r.q.dtype, torch.float32)
    fq, fk, values = phi(r.q.to(wide)), phi(r.k.to(wide)), r.v.to(wide)
    if r.mask is not None:
        # phi(0) is not 0, so padding is removed after the feature map, not before.
        fk, values = zero_masked(r.mask, fk, values)
    return fq, fk, values


def quadratic(r: LinearOperands) -> tuple[Tensor, Tensor]:
    """Causal linear attention from the full matrix of products."""
    state, segments = r.state, r.segments
    with torch.autocast(r.q.device.type, enabled=False):
        fq, fk, values = _mapped(r)
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
        return (above / divisors(below + r.eps)).to(r.v.dtype), end
