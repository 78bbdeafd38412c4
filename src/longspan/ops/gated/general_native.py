"""The general delta rule in C++: whole sequences, forward and backward, and one token."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..native import build
from ..native.build.openmp import threads
from ..native.call import HALVES, LARGEST, TYPES, available, kernels, pointers, readable, strides
from ..operands import double_backward, mark_overwritten, stored
from ..packed import by_sequence, check_packed
from .general_chunks import composed
from .native import SPAN, _kind, _starts


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    early: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``general.recur`` in C++: q, k, read, erase (B,G,N,D), v (B,H,N,E), of any strides, float32 or bfloat16.

    -> o (B,H,N,E) with dtype and strides of v, state (B,H,D,E) float32. All sums are in float32. Time is
    O(N (D E + 64 (D + E))). Beyond inputs, output and gradients, memory is that of one state per head, one more per 512
    tokens and head for the backward pass, and about 20 per thread. Results do not depend on the number of threads, bit
    for bit. Only for operands for which ``call.why_not`` is empty. Raises MemoryError if the states cannot be
    allocated.
    """
    log_decay = None if log_decay is None else log_decay.float()
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    early = early and log_decay is not None
    return _Attend.apply(q, k, v, read, erase, log_decay, state, mask, segments, offsets, scale, early)


class _Attend(torch.autograd.Function):
    """Takes the arguments of ``_forward`` but ``keeps``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        run: Any = _forward_op if torch.compiler.is_compiling() else _forward
        o, end, starts = run(*given, any(ctx.needs_input_grad))
        ctx.save_for_backward(*given[:10], starts)
        ctx.options = given[10:]
        return o, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        *inputs, mask, segments, offsets, starts = ctx.saved_tensors
        scale, early = ctx.options
        if torch.is_grad_enabled() or not available("general/backward"):
            options: dict[str, Any] = {"mask": mask, "segments": segments, "scale": scale, "early": early}
            grads = double_backward(_again, inputs, upstream, cu_seqlens=offsets, **options)
        else:
            run = _backward_op if torch.compiler.is_compiling() else _backward
            given: tuple[Any, ...] = (*upstream, *inputs[:6], mask, segments, offsets, starts, scale, early)
            found = iter(run(*given))
            grads = [None if t is None else next(found) for t in inputs]
        return (*grads, None, None, None, None, None)


def _again(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return by_sequence(composed, given[:6], given[6], along=2, like=2, **options)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    scale: float,
    early: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E), and with ``keeps`` the states before every 512 tokens."""
    check_packed(offsets, len(q), q.shape[2])
    assert kernels("general/forward").longspan_general_span() == SPAN
    o, end, starts = (
        fresh_like(v),
        torch.empty_like(state, memory_format=torch.contiguous_format),
        _starts(state, q, offsets, keeps),
    )
    first = state.contiguous()
    mask, segments, offsets = (None if t is None else t.contiguous() for t in (mask, segments, offsets))
    kept = starts if keeps else None
    failed = kernels("general/forward").longspan_general_forward(
        *pointers(q, k, v, read, erase, o, log_decay, first, end, kept, mask, segments, offsets),
        strides(q, k, v, read, erase, o, _gate(log_decay)),
        _sizes(state, q, v, early),
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
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    starts: Tensor,
    scale: float,
    early: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, read and erase, of log_decay if given, and of the first state."""
    # Value heads that share a query sum their gradients, for which half precision is not enough.
    shared, vectors = v.shape[1] > q.shape[1] and v.dtype is not torch.float32, (q, k, read, erase)
    dq, dk, dread, derase = (torch.empty_like(t, dtype=torch.float32) if shared else fresh_like(t) for t in vectors)
    dv, first = fresh_like(v), grad_end.clone(memory_format=torch.contiguous_format)
    ddecay = None if log_decay is None else fresh_like(log_decay)
    mask, segments, offsets = (None if t is None else t.contiguous() for t in (mask, segments, offsets))
    grads = (dq, dk, dv, dread, derase)
    failed = kernels("general/backward").longspan_general_backward(
        *pointers(q, k, v, read, erase, grad, *grads, log_decay, ddecay, starts, first, mask, segments, offsets),
        strides(q, k, v, read, erase, grad, *grads, _gate(log_decay), _gate(ddecay)),
        _sizes(first, q, v, early),
        _kind(log_decay),
        TYPES[v.dtype],
        TYPES[dq.dtype],
        scale,
        threads(),
    )
    if failed:
        raise MemoryError(f"cannot allocate the states of {threads()} threads")
    found = [t.to(like.dtype) for t, like in zip(grads, (q, k, v, read, erase), strict=True)]
    return [*found, *([] if ddecay is None else [ddecay]), first]


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    scale: float | None,
    early: bool,
    state: Tensor,
    donate: bool,
) -> tuple[Tensor, Tensor] | None:
    """One token of ``general.recur`` in one pass over ``state`` (B,H,D,E), in place with ``donate``.

    q, k, read, erase (B,G,1,D), v (B,H,1,E), in float32, bfloat16 or float16, log_decay (B,H,1) or (B,H,1,D), state
    float32 -> o (B,H,1,E) in v's dtype, state. Returns None for other operands, and without kernels. It runs once per
    token and layer, so it is written for speed.
    """
    if (dtype := v.dtype) not in HALVES or not q.dim() == v.dim() == 4:
        return None
    if log_decay is not None and dtype is not torch.float32 and log_decay.dtype in HALVES:
        log_decay = log_decay.float()
    if not readable(q, k, v, read, erase, dtype=dtype) or not readable(state, log_decay) or not stored(state):
        return None
    batch, groups, tokens, keys = shape = q.shape
    _, heads, _, values = v.shape
    if not k.shape == read.shape == erase.shape == shape or v.shape != (batch, heads, 1, values):
        return None
    if tokens != 1 or not batch * groups or heads % groups or not (0 < keys <= LARGEST and 0 < values <= LARGEST):
        return None
    if state.shape != (batch, heads, keys, values):
        return None
    decays = None
    if log_decay is not None:
        if log_decay.shape not in ((batch, heads, 1), (batch, heads, 1, keys)):
            return None
        log_decay = log_decay.contiguous()
        decays = log_decay.data_ptr()
    if (library := build.loaded("general/step")) is None:
        return None
    q, k, v, read, erase = (t.contiguous() for t in (q, k, v, read, erase))
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(v)
    failed = library.longspan_general_step(
        *pointers(state, q, k, v, read, erase),
        decays,
        out.data_ptr(),
        batch * heads,
        heads // groups,
        keys,
        values,
        _kind(log_decay),
        early,
        HALVES[dtype],
        keys**-0.5 if scale is None else scale,
        threads(),
    )
    assert not failed
    if donate:
        mark_overwritten(state)
    return out, state


_forward_op = torch.library.custom_op("longspan::general_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::general_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, _, _, _, state, _, _, offsets, _, _, keeps = given
    end = torch.empty_like(state, memory_format=torch.contiguous_format)
    return torch.empty_like(v), end, _starts(state, q, offsets, keeps)


@_backward_op.register_fake
def _(*given: Any) -> list[Tensor]:
    _, grad_end, *inputs = given[:8]
    found = [torch.empty_like(t) for t in inputs if t is not None]
    return [*found, torch.empty_like(grad_end, memory_format=torch.contiguous_format)]


def _gate(log_decay: Tensor | None) -> Tensor:
    """Return the log decays with four axes, for their strides; a placeholder for None."""
    if log_decay is None:
        return torch.empty(1, 1, 1, 1)
    return log_decay if log_decay.dim() == 4 else log_decay[..., None]


def _sizes(state: Tensor, q: Tensor, v: Tensor, early: bool) -> "ctypes.Array[ctypes.c_long]":
    sizes = len(state), q.shape[1], v.shape[1], *q.shape[2:], v.shape[-1], early
    return (ctypes.c_long * 7)(*sizes)
