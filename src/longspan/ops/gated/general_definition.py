"""The general delta rule token by token, by its definition."""

import torch
from torch import Tensor

from ..operands import zero_masked
from ..packed import by_sequence
from .decays import LOWEST
from .operands import GeneralRecurrence


def attend(r: GeneralRecurrence) -> tuple[Tensor, Tensor]:
    """``general.serve`` by the definition, in float32 at least."""
    return by_sequence(_loop, r)


def _loop(r: GeneralRecurrence) -> tuple[Tensor, Tensor]:
    q, k, v, read, erase, log_decay, state, mask, segments, _, scale, early = r
    if not k.shape[1]:
        return torch.zeros_like(v), state.clone()
    wide, groups = state.dtype, v.shape[1] // k.shape[1]
    q, k, v, read, erase, log_decay = zero_masked(mask, q, k, v, read, erase, log_decay)
    queries, keys, reads, erasures = (t.to(wide).repeat_interleave(groups, 1) for t in (q, k, read, erase))
    values, out, state = v.to(wide), [], state.clone()
    for t in range(q.shape[2]):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        after = state
        if log_decay is not None:
            alpha = log_decay[:, :, t].to(wide).clamp(min=LOWEST).exp()
            after = state * (alpha[..., None, None] if alpha.dim() == 2 else alpha[..., None])
        seen = reads[:, :, t, None, :] @ (state if early else after)  # (B,H,1,E)
        after = after + keys[:, :, t, :, None] * values[:, :, t, None, :] - erasures[:, :, t, :, None] * seen
        result = scale * queries[:, :, t, None, :] @ after
        if mask is not None:
            real = mask[:, t, None, None, None]
            after, result = torch.where(real, after, state), result.masked_fill(~real, 0.0)
        state = after
        out.append(result)
    return (torch.cat(out, 2).to(v.dtype) if out else torch.zeros_like(v)), state
