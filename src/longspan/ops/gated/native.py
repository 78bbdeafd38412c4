"""Decay and the delta rule in C++: whole sequences, forward and backward, and one token."""

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..native import build
from ..native.build.openmp import threads
from ..native.call import HALVES, LARGEST, TYPES, available, kernels, pointers, readable, strides
from ..operands import double_backward, mark_overwritten, stored
from ..packed import check_packed
from .chunks import CHUNK, composed
from .prepared import prepared

DECAYS = {None: 0, 3: 1, 4: 2}  # axes of the log decays -> none, per head, per channel, as in gated/chunk.h


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float,
    mask: Tensor | None,
    segments: Tensor | None,
    state: Tensor,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``gated.recur`` in C++: q, k (B,G,N,D), v (B,H,N,E), of any strides, float32 or bfloat16.

    -> o (B,H,N,E) with dtype and strides of v, state (B,H,D,E) float32. All sums are in float32. Time is
    O(N (D E + 32 (D + E))). Beyond inputs, output and gradients, memory is that of one state per head, one more per 512
    tokens and head for the backward pass, and about 20 per thread. Results do not depend on the number of threads, bit
    for bit. Only for operands for which ``call.why_not`` is empty. Raises MemoryError if the states cannot be
    allocated.
    """
    log_decay, beta = (None if t is None else t.float() for t in (log_decay, beta))
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    return _Attend.apply(q, k, v, log_decay, beta, state, mask, segments, offsets, scale, normalize)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        offsets: Tensor | None,
        scale: float,
        normalize: bool,
    ) -> tuple[Tensor, Tensor]:
        run = _forward_op if torch.compiler.is_compiling() else _forward
        keeps = any(ctx.needs_input_grad)
        o, end, starts = run(q, k, v, log_decay, beta, state, mask, segments, offsets, scale, normalize, keeps)
        ctx.save_for_backward(q, k, v, log_decay, beta, state, mask, segments, offsets, starts)
        ctx.options = scale, normalize
        return o, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        grad, grad_end = upstream
        *inputs, mask, segments, offsets, starts = ctx.saved_tensors
        if torch.is_grad_enabled() or not available("gated/backward"):
            scale, normalize = ctx.options
            options: dict[str, Any] = {"mask": mask, "segments": segments, "scale": scale, "chunk": CHUNK}
            form = partial(prepared, composed, normalize=normalize, cu_seqlens=offsets)
            grads = double_backward(form, inputs, (grad, grad_end), **options)
        else:
            run = _backward_op if torch.compiler.is_compiling() else _backward
            given = (*inputs[:5], mask, segments, offsets, starts, *ctx.options)
            found = iter(run(grad, grad_end, *given))
            grads = [None if t is None else next(found) for t in inputs]
        return (*grads, None, None, None, None, None)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    scale: float,
    normalize: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E), and with ``keeps`` the states before every 512 tokens."""
    check_packed(offsets, len(q), q.shape[2])
    assert kernels("gated/forward").longspan_gated_span() == SPAN
    o, end, starts = (
        fresh_like(v),
        torch.empty_like(state, memory_format=torch.contiguous_format),
        _starts(state, q, offsets, keeps),
    )
    first = state.contiguous()
    mask, segments, offsets = (None if t is None else t.contiguous() for t in (mask, segments, offsets))
    failed = kernels("gated/forward").longspan_gated_forward(
        *pointers(q, k, v, o, log_decay, beta, first, end, starts if keeps else None, mask, segments, offsets),
        strides(q, k, v, o, *_gates(log_decay, beta)),
        _sizes(state, q, v, normalize),
        _kind(log_decay),
        TYPES[v.dtype],
        scale,
        threads(),
    )
    if failed:
        raise MemoryError(f"cannot allocate the states of {threads()} threads")
    return o, end, starts


def _backward(
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    starts: Tensor,
    scale: float,
    normalize: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, of log_decay and beta if given, and of the first state."""
    # Value heads that share a query sum their gradients, for which half precision is not enough.
    shared = v.shape[1] > q.shape[1] and v.dtype is not torch.float32
    dq, dk = (torch.empty_like(t, dtype=torch.float32) if shared else fresh_like(t) for t in (q, k))
    dv, first = fresh_like(v), grad_end.clone(memory_format=torch.contiguous_format)
    ddecay, dbeta = (None if t is None else fresh_like(t) for t in (log_decay, beta))
    mask, segments, offsets = (None if t is None else t.contiguous() for t in (mask, segments, offsets))
    gates = (*_gates(log_decay, beta), *_gates(ddecay, dbeta))
    failed = kernels("gated/backward").longspan_gated_backward(
        *pointers(q, k, v, grad, dq, dk, dv, log_decay, beta, ddecay, dbeta, starts, first, mask, segments, offsets),
        strides(q, k, v, grad, dq, dk, dv, *gates),
        _sizes(first, q, v, normalize),
        _kind(log_decay),
        TYPES[v.dtype],
        TYPES[dq.dtype],
        scale,
        threads(),
    )
    if failed:
        raise MemoryError(f"cannot allocate the states of {threads()} threads")
    return [t for t in (dq.to(q.dtype), dk.to(k.dtype), dv, ddecay, dbeta, first) if t is not None]


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    state: Tensor,
    donate: bool,
    normalize: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """One token of ``gated.recur`` in one pass over ``state`` (B,H,D,E), in place with ``donate``.

    q, k (B,G,1,D), v (B,H,1,E), in float32, bfloat16 or float16, log_decay (B,H,1) or (B,H,1,D), beta (B,H,1), state
    float32 -> o (B,H,1,E) in v's dtype, state. Returns None for other operands, and without kernels. It runs once per
    token and layer, so it is written for speed.
    """
    if (dtype := v.dtype) not in HALVES or not q.dim() == v.dim() == 4:
        return None
    if dtype is not torch.float32:
        log_decay, beta = (t if t is None or t.dtype not in HALVES else t.float() for t in (log_decay, beta))
    if not readable(q, k, v, dtype=dtype) or not readable(state, log_decay, beta) or not stored(state):
        return None
    batch, groups, tokens, keys = shape = q.shape
    _, heads, _, values = v.shape
    if k.shape != shape or v.shape != (batch, heads, 1, values) or state.shape != (batch, heads, keys, values):
        return None
    if tokens != 1 or not batch * groups or heads % groups or not (0 < keys <= LARGEST and 0 < values <= LARGEST):
        return None
    decays = rates = None
    if log_decay is not None:
        if log_decay.shape not in ((batch, heads, 1), (batch, heads, 1, keys)):
            return None
        log_decay = log_decay.contiguous()
        decays = log_decay.data_ptr()
    if beta is not None:
        if beta.shape != (batch, heads, 1):
            return None
        beta = beta.contiguous()
        rates = beta.data_ptr()
    if (library := build.loaded("gated/step")) is None:
        return None
    factor = keys**-0.5 if scale is None else scale
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(v)
    failed = library.longspan_gated_step(
        state.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        decays,
        rates,
        out.data_ptr(),
        batch * heads,
        heads // groups,
        keys,
        values,
        _kind(log_decay),
        normalize,
        HALVES[dtype],
        factor,
        threads(),
    )
    assert not failed
    if donate:
        mark_overwritten(state)
    return out, state


_forward_op = torch.library.custom_op("longspan::gated_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::gated_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    scale: float,
    normalize: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    end = torch.empty_like(state, memory_format=torch.contiguous_format)
    return torch.empty_like(v), end, _starts(state, q, offsets, keeps)


@_backward_op.register_fake
def _(
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    starts: Tensor,
    scale: float,
    normalize: bool,
) -> list[Tensor]:
    found = [torch.empty_like(t) for t in (q, k, v, log_decay, beta) if t is not None]
    return [*found, torch.empty_like(grad_end, memory_format=torch.contiguous_format)]


SPAN = 512  # as in gated/chunk.h


def _starts(state: Tensor, q: Tensor, offsets: Tensor | None, keeps: bool) -> Tensor:
    """Allocate the states (B,H,spans,D,E) for the backward pass; packed sequences as gated/chunk.h counts them."""
    batch, heads, keys, values = state.shape
    if not keeps:
        return state.new_empty(0, heads, 0, keys, values)
    if offsets is not None:
        return state.new_empty(q.shape[2] // SPAN + batch, heads, 1, keys, values)
    return state.new_empty(batch, heads, -(-q.shape[2] // SPAN), keys, values)


def _kind(log_decay: Tensor | None) -> int:
    return DECAYS[None if log_decay is None else log_decay.dim()]


def _gates(log_decay: Tensor | None, beta: Tensor | None) -> list[Tensor]:
    """Return both with four axes, for their strides; a placeholder for None."""
    nothing = torch.empty(1, 1, 1, 1)
    return [nothing if t is None else t if t.dim() == 4 else t[..., None] for t in (log_decay, beta)]


def _sizes(state: Tensor, q: Tensor, v: Tensor, normalize: bool) -> "ctypes.Array[ctypes.c_long]":
    sizes = len(state), q.shape[1], v.shape[1], *q.shape[2:], v.shape[-1], normalize
    return (ctypes.c_long * 7)(*sizes)
