"""The selective scan in torch: h_t = e^(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = (C_t . h_t + D x_t) silu(z_t).

Without A, the factor of h_{t-1} is 1 - dt_t B_t^2.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..operands import transformed
from ..packed import by_sequence
from .diagonal_forms import CHUNK, borders, scan
from .operands import Selective


def _prepared(r: Selective) -> list[Any]:
    """Return x, step sizes, B, C and z in the dtype of the state, zero at masked tokens: these change no state."""
    wide, dt, mask, dt_bias = r.state.dtype, r.dt, r.mask, r.dt_bias
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    away = None if mask is None else ~mask[..., None]
    if away is not None:
        dt = dt.masked_fill(away, 0.0)
    dt = F.softplus(dt) if r.softplus else dt
    found = [None if t is None else t.to(wide) for t in (r.x, dt, r.B, r.C, r.z)]
    return found if away is None else [None if t is None else t.masked_fill(away, 0.0) for t in found]


def reference(r: Selective) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in the dtype of the state."""
    return by_sequence(_loop, r)


def _loop(r: Selective) -> tuple[Tensor, Tensor]:
    mask, D, wide, clear = r.mask, r.D, r.state.dtype, borders(r.segments, r.x)
    x, dt, b, c, z = _prepared(r)
    state, out, rates = r.state.clone(), [], None if r.A is None else r.A.to(wide)
    for t in range(x.shape[1]):
        state = torch.where(clear[:, t, :, None], 0.0, state)
        step = dt[:, t, :, None]  # (B,channels,1)
        left = 1 - step * b[:, t, None].square() if rates is None else (step * rates).exp()
        state = left * state + step * x[:, t, :, None] * b[:, t, None]
        y = (state * c[:, t, None]).sum(-1)
        out.append(y if D is None else y + D.to(wide) * x[:, t])
    y = torch.stack(out, 1) if out else torch.zeros_like(x)
    y = y if z is None else y * F.silu(z)
    return (y if mask is None else y.masked_fill(~mask[..., None], 0.0)).to(r.x.dtype), state


def attend(r: Selective) -> tuple[Tensor, Tensor]:
    """The same, a chunk of tokens at a time.

    The backward pass computes each chunk again, so memory beyond inputs and outputs is that of the states of one chunk.
    """
    return by_sequence(_attend, r)


def _attend(r: Selective) -> tuple[Tensor, Tensor]:
    if not r.x.numel() or not r.B.numel():
        return _loop(r)
    state, mask, D, wide, clear = r.state, r.mask, r.D, r.state.dtype, borders(r.segments, r.x)
    x, dt, b, c, z = _prepared(r)
    rates, out = None if r.A is None else r.A.to(wide), []
    keeps = torch.is_grad_enabled() and not transformed()
    for start in range(0, x.shape[1], CHUNK):
        given: list[Any] = [t[:, start : start + CHUNK] for t in (x, dt, b, c, clear)] + [rates, state]
        if keeps:
            y, state = checkpoint(_chunk, *given, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportGeneralTypeIssues] (torch's stubs do not know what it returns)
        else:
            y, state = _chunk(*given)
        out.append(y)
    y = torch.cat(out, 1)
    y = y if D is None else y + D.to(wide) * x
    y = y if z is None else y * F.silu(z)
    return (y if mask is None else y.masked_fill(~mask[..., None], 0.0)).to(r.x.dtype), state


def _chunk(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, clear: Tensor, rates: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B,N,channels) and the last state of few tokens."""
    shape, u = (*x.shape, B.shape[2]), (dt * x)[..., None] * B[:, :, None]
    if rates is None:
        # What is left may round to 0, whose logarithm has no gradient.
        least = torch.finfo(dt.dtype).eps / 2 - 1
        g = (-dt[..., None] * B[:, :, None].square()).clamp(min=least).log1p()
    else:
        g = dt[..., None] * rates
    g = torch.where(clear[..., None], 0.0, g)
    h = scan(u.flatten(2), g.flatten(2), clear, state.flatten(1)).view(shape)
    return (h * C[:, :, None]).sum(-1), h[:, -1].clone()
