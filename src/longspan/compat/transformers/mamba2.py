"""Mamba-2's scan and step under the names and in the layouts of transformers, where states have values first."""

import torch.nn.functional as F
from torch import Tensor

from ...ops.gated import decay_attention
from ...ops.tensors import upcast_half
from .packing import borders
from .states import carried, may_be_overwritten


def scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs,
) -> Tensor | tuple[Tensor, Tensor]:
    """x (B,N,H,P), dt (B,N,H), A, D, dt_bias (H,), B, C (B,N,G,S), states (B,H,P,S) -> (B,N,H,P), the last state.

    In float32 at least, as in the original; ``chunk_size`` says how that computes, and has no effect here. Borders of
    packed rows are in ``kwargs``: see ``borders``.

    Source: transformers, ``mamba2_chunk_scan``; Dao and Gu 2024 (2405.21060), eq. 16.
    """
    x = upcast_half(hidden_states)
    batch, n = x.shape[:2]
    segments, dt = borders(kwargs, batch, n), _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    q, k, v = (t.transpose(1, 2) for t in (upcast_half(C), upcast_half(B), x * dt[..., None]))
    o, state = decay_attention(
        q,
        k,
        v,
        log_decay=(A.to(dt.dtype) * dt).mT,
        scale=1.0,
        segments=segments,
        return_state=True,
        state=None if initial_states is None else carried(initial_states.mT, v.dtype),
    )
    o = o.transpose(1, 2)
    if D is not None:
        o = o + D.to(o.dtype)[:, None] * x
    # Callers view the output with other axes. A cache's buffer keeps the state's strides, in which steps need no copy.
    return (o.contiguous(), state.mT) if return_final_states else o.contiguous()


def step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """One token: state (B,H,P,S), overwritten; x, z (B,H,P), dt (B,H,P), A (H,P,S), D, dt_bias (H,P), B, C (B,G,S).

    -> (B,H,P) in x's dtype. Of dt, A, D and dt_bias one number per head counts, as in Mamba-2: see ``per_head``.

    Source: transformers, ``mamba2_selective_state_update``.
    """
    dt = _steps(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)  # (B,H)
    x = upcast_half(hidden_states)
    q, k, v = (t[:, :, None] for t in (upcast_half(C), upcast_half(B), x * dt[..., None]))
    o, end = decay_attention(
        q,
        k,
        v,
        log_decay=(A[:, 0, 0].to(dt.dtype) * dt)[..., None],
        scale=1.0,
        return_state=True,
        state=carried(state.mT, v.dtype),
        donate=may_be_overwritten(state),
    )
    state.copy_(end.mT)  # onto itself, where the kernel has overwritten it
    o = o[:, :, 0]
    if D is not None:
        o = o + x * D.to(o.dtype)
    if z is not None:
        o = o * F.silu(upcast_half(z))
    return o.to(hidden_states.dtype)


def per_head(state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, *others, dt_bias=None, **kwargs) -> str:
    """Why ``step`` cannot serve a call: numbers that differ inside a head; "" where it can."""
    del state, hidden_states, others, kwargs
    alike = all(
        stride == 0 or size == 1 for t in (A,) for stride, size in zip(t.stride()[1:], t.shape[1:], strict=True)
    )
    alike = alike and all(t is None or t.stride(-1) == 0 or t.shape[-1] == 1 for t in (dt, dt_bias))
    return "" if alike else "decays differ inside a head"


def fused(*args, **kwargs) -> None:
    """None: there is no single kernel from the projection to the output, and callers then go on step by step.

    The original says so too, except for packed rows, which it refuses.
    """


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The step sizes, in float32 at least."""
    dt = upcast_half(dt)
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt
