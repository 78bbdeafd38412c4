"""The selective scan in torch: h_t = e^(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = (C_t . h_t + D x_t) silu(z_t)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..operands import transformed
from .diagonal_forms import CHUNK, borders, scan


def prepared(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    mask: Tensor | None,
    wide: torch.dtype,
) -> list[Any]:
    """Return x, step sizes, B, C and z in the dtype ``wide``, zero at masked tokens: these change no state."""
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    away = None if mask is None else ~mask[..., None]
    if away is not None:
        dt = dt.masked_fill(away, 0.0)
    dt = F.softplus(dt) if softplus else dt
    found = [None if t is None else t.to(wide) for t in (x, dt, B, C, z)]
    return found if away is None else [None if t is None else t.masked_fill(away, 0.0) for t in found]


def reference(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    state: Tensor,
    *,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    mask: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in the dtype of ``state``; arguments as in ``selective``."""
    dtype, wide, clear = x.dtype, state.dtype, borders(segments, x)
    x, dt, b, c, z = prepared(x, dt, B, C, z, dt_bias, softplus, mask, wide)
    state, out, rates = state.clone(), [], A.to(wide)
    for t in range(x.shape[1]):
        state = torch.where(clear[:, t, :, None], 0.0, state)
        step = dt[:, t, :, None]  # (B,channels,1)
        state = (step * rates).exp() * state + step * x[:, t, :, None] * b[:, t, None]
        y = (state * c[:, t, None]).sum(-1)
        out.append(y if D is None else y + D.to(wide) * x[:, t])
    y = torch.stack(out, 1) if out else torch.zeros_like(x)
    y = y if z is None else y * F.silu(z)
    return (y if mask is None else y.masked_fill(~mask[..., None], 0.0)).to(dtype), state


def attend(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    state: Tensor,
    *,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    mask: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same, a chunk of tokens at a time; arguments as in ``selective``.

    The backward pass computes each chunk again, so memory beyond inputs and outputs is that of the states of one chunk.
    """
    dtype, wide, clear = x.dtype, state.dtype, borders(segments, x)
    if not x.numel() or not A.numel():
        options: dict[str, Any] = {
            "A": A,
            "D": D,
            "dt_bias": dt_bias,
            "softplus": softplus,
            "mask": mask,
            "segments": segments,
        }
        return reference(x, dt, B, C, z, state, **options)
    x, dt, b, c, z = prepared(x, dt, B, C, z, dt_bias, softplus, mask, wide)
    rates, out = A.to(wide), []
    keeps = torch.is_grad_enabled() and not transformed()
    for start in range(0, x.shape[1], CHUNK):
        given: list[Any] = [t[:, start : start + CHUNK] for t in (x, dt, b, c, clear)] + [rates, state]
        if keeps:
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            y, state = checkpoint(_chunk, *given, **how)  # pyright: ignore[reportGeneralTypeIssues] (torch's stubs do not know what it returns)
        else:
            y, state = _chunk(*given)
        out.append(y)
    y = torch.cat(out, 1)
    y = y if D is None else y + D.to(wide) * x
    y = y if z is None else y * F.silu(z)
    return (y if mask is None else y.masked_fill(~mask[..., None], 0.0)).to(dtype), state


def _chunk(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, clear: Tensor, rates: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B,N,channels) and the last state of few tokens."""
    shape = (*x.shape, rates.shape[1])
    g, u = dt[..., None] * rates, (dt * x)[..., None] * B[:, :, None]
    g = torch.where(clear[..., None], 0.0, g)
    h = scan(u.flatten(2), g.flatten(2), clear, state.flatten(1)).view(shape)
    return (h * C[:, :, None]).sum(-1), h[:, -1].clone()
