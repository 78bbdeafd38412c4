"""Mamba-2's scan and step with the names and layouts of transformers, where states have values first."""

import torch.nn.functional as F
from torch import Tensor

from ...ops.gated import decay_attention
from ...ops.tensors import upcast_half
from .packing import borders, real
from .states import carried, may_be_overwritten
from .undoing import recur


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
    """Replace ``mamba2_chunk_scan``, in float32 or wider. In shapes, P is the head dim, S the state dim, G groups.

    hidden_states (B,N,H,P), dt (B,N,H), A and dt_bias (H,), B and C (B,N,G,S), D (H,) or (H,P), initial_states
    (B,H,P,S) -> (B,N,H,P), and with ``return_final_states`` the states (B,H,P,S). ``chunk_size`` has no effect on the
    result. ``kwargs`` may have the boundaries of packed rows; see ``borders``.

    References:
        transformers, ``mamba2_chunk_scan``; Dao and Gu 2024 (2405.21060), eq. 16.
    """
    x = upcast_half(hidden_states)
    batch, n = x.shape[:2]
    segments, dt = borders(kwargs, batch, n), step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    q, k, v = (t.transpose(1, 2) for t in (upcast_half(C), upcast_half(B), x * dt[..., None]))
    o, state = recur(
        decay_attention,
        {"query": q, "key": k, "value": v, "log_decay": (A.to(dt.dtype) * dt).mT}
        | {"mask": real(batch, n), "segments": segments},
        axis=2,
        state=None if initial_states is None else carried(initial_states.mT, v.dtype),
        back=_values_first,
        scale=1.0,
    )
    o = o.transpose(1, 2)
    if D is not None:
        o = o + (D if D.dim() == 2 else D[:, None]).to(o.dtype) * x
    # Callers view the output with other axes. A cache keeps the state's strides, with which steps need no copy.
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
    """Replace ``mamba2_selective_state_update``: one decode step. Letters as in ``scan``.

    ``dt``, ``A`` and ``dt_bias`` are constant inside a head, as in Mamba-2; ``per_head`` checks it.

    state (B,H,P,S), which is overwritten, hidden_states, dt and z (B,H,P), A (H,P,S), B and C (B,G,S), D and dt_bias
    (H,P) -> (B,H,P) in the dtype of ``hidden_states``. ``kwargs`` are ignored.

    References:
        transformers, ``mamba2_selective_state_update``.
    """
    dt = step_sizes(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)  # (B,H)
    x = upcast_half(hidden_states)
    q, k, v = (t[:, :, None] for t in (upcast_half(C), upcast_half(B), x * dt[..., None]))
    o, end = recur(
        decay_attention,
        {"query": q, "key": k, "value": v, "log_decay": (A[:, 0, 0].to(dt.dtype) * dt)[..., None]}
        | {"mask": real(len(x), 1)},
        axis=2,
        state=carried(state.mT, v.dtype),
        back=_values_first,
        scale=1.0,
        donate=may_be_overwritten(state),
    )
    state.copy_(end.mT)  # a copy onto itself where the kernel has overwritten it
    o = o[:, :, 0]
    if D is not None:
        o = o + x * D.to(o.dtype)
    if z is not None:
        o = o * F.silu(upcast_half(z))
    return o.to(hidden_states.dtype)


def per_head(state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, *others, dt_bias=None, **kwargs) -> str:
    """Return why ``step`` cannot compute a call, or "": its decays must be constant inside a head."""
    del state, hidden_states, others, kwargs
    alike = all(
        stride == 0 or size == 1 for t in (A,) for stride, size in zip(t.stride()[1:], t.shape[1:], strict=True)
    )
    alike = alike and all(t is None or t.stride(-1) == 0 or t.shape[-1] == 1 for t in (dt, dt_bias))
    return "" if alike else "decays differ inside a head"


def _values_first(state: Tensor) -> Tensor:
    return state.mT


def step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return the step sizes in float32 or wider."""
    dt = upcast_half(dt)
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt
