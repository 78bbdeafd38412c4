"""The recurrence token by token, by its definition."""

import torch
from torch import Tensor

from ..operands import zero_masked
from .decays import LOWEST
from .operands import Recurrence, prepared


def attend(r: Recurrence) -> tuple[Tensor, Tensor]:
    """``gated.serve`` by the definition, in float32 at least."""
    return prepared(_loop, r)


def _loop(r: Recurrence) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, beta, state, mask, segments, _, scale, _ = r
    if not k.shape[1]:
        return torch.zeros_like(v), state.clone()
    wide, groups = state.dtype, v.shape[1] // k.shape[1]
    q, k, v, log_decay, beta = zero_masked(mask, q, k, v, log_decay, beta)
    queries, keys = (t.to(wide).repeat_interleave(groups, 1) for t in (q, k))
    values, out, state = v.to(wide), [], state.clone()
    for t in range(q.shape[2]):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        after = state
        if log_decay is not None:
            alpha = log_decay[:, :, t].to(wide).clamp(min=LOWEST).exp()
            after = state * (alpha[..., None, None] if alpha.dim() == 2 else alpha[..., None])
        key, new = keys[:, :, t, :, None], values[:, :, t, None, :]  # (B,H,D,1), (B,H,1,E)
        if beta is not None:
            new = beta[:, :, t, None, None].to(wide) * (new - key.mT @ after)
        after = after + key * new
        read = scale * queries[:, :, t, None, :] @ after
        if mask is not None:
            real = mask[:, t, None, None, None]
            after, read = torch.where(real, after, state), read.masked_fill(~real, 0.0)
        state = after
        out.append(read)
    return (torch.cat(out, 2).to(v.dtype) if out else torch.zeros_like(v)), state
