"""Decay and the delta rule in C++: whole sequences, forward and backward, and one token."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..custom_ops import Kernel, contiguous_like, kernel
from ..native import build, call
from ..native.build.openmp import threads
from ..native.call import HALVES, TYPES, check_allocated, kernels, pointers, readable, strides
from ..operands import contiguous, mark_overwritten
from ..packed import check_packed
from .chunks import composed
from .operands import GeneralRecurrence, Recurrence, prepared, step_sizes

R = TypeVar("R", Recurrence, GeneralRecurrence)

DECAYS = {None: 0, 3: 1, 4: 2}  # axes of the log decays -> none, per head, per channel, as in gated/chunk.h
BY_VALUE = 3  # per channel of the values, as there
SPAN = 512  # as in gated/chunk.h


def why_not(r: Recurrence) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    return call.why_not(r.q, r.k, r.v, r.state, *r[3:5], *r[6:9], family="gated")


def _prepare(r: Recurrence) -> Recurrence:
    log_decay, beta = (None if t is None else t.float() for t in (r.log_decay, r.beta))
    offsets = None if r.cu_seqlens is None else r.cu_seqlens.long()
    return r._replace(log_decay=log_decay, beta=beta, cu_seqlens=offsets)


def sequences(
    family: str, operands: type[R], vectors: int, *, again: Callable[[R], tuple[Tensor, ...]], prepare: Callable[[R], R]
) -> Kernel:
    """Return the kernels of a family for whole sequences, as a function of its operands.

    Args:
        family: ``gated`` or ``general``.
        operands: Their type: first vectors (q, k, v and others), then gates, then the state. The last two are the scale
            and a flag.
        vectors: The number of vectors.
        again: As in ``kernel``, like ``prepare``.
        prepare: Converts gates to float32 and offsets to int64.
    """
    at = operands._fields.index("state")

    def forward(r: Any, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
        """o (B,H,N,E), the last state (B,H,D,E), and with ``keeps`` the states before every 512 tokens."""
        q, v, state, library = r.q, r.v, r.state, kernels(f"{family}/forward")
        check_packed(r.cu_seqlens, len(q), q.shape[2])
        assert getattr(library, f"longspan_{family}_span")() == SPAN
        o, end, starts = fresh_like(v), contiguous_like(state), kept_states(state, q, r.cu_seqlens, keeps)
        first, *marks = contiguous(state, r.mask, r.segments, r.cu_seqlens)
        failed = getattr(library, f"longspan_{family}_forward")(
            *pointers(*r[:vectors], o, *r[vectors:at], first, end, starts if keeps else None, *marks),
            strides(*r[:vectors], o, *map(gate, r[vectors:at])),
            sizes(state, q, v, r[-1]),
            kind(r.log_decay),
            TYPES[v.dtype],
            r.scale,
            threads(),
        )
        check_allocated(failed)
        return o, end, starts

    def backward(
        r: Any, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        q, v, gates = r.q, r.v, r[vectors:at]
        grad, first = grads[0], grads[1].clone(memory_format=torch.contiguous_format)
        # Value heads that share a query sum their gradients, for which half precision is not enough.
        shared = v.shape[1] > q.shape[1] and v.dtype is not torch.float32
        made = [
            torch.empty_like(t, dtype=torch.float32) if shared and t is not v else fresh_like(t) for t in r[:vectors]
        ]
        changes = [None if t is None else fresh_like(t) for t in gates]
        marks = contiguous(r.mask, r.segments, r.cu_seqlens)
        failed = getattr(kernels(f"{family}/backward"), f"longspan_{family}_backward")(
            *pointers(*r[:vectors], grad, *made, *gates, *changes, *kept, first, *marks),
            strides(*r[:vectors], grad, *made, *map(gate, (*gates, *changes))),
            sizes(first, q, v, r[-1]),
            kind(r.log_decay),
            TYPES[v.dtype],
            TYPES[made[0].dtype],
            r.scale,
            threads(),
        )
        check_allocated(failed)
        return [*(t.to(like.dtype) for t, like in zip(made, r, strict=False)), *changes, first]

    def shapes(r: Any, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(r.v), contiguous_like(r.state), kept_states(r.state, r.q, r.cu_seqlens, keeps)

    return kernel(
        family,
        operands,
        forward,
        backward,
        shapes=shapes,
        again=again,
        ready=lambda: call.available(f"{family}/backward"),
        prepare=prepare,
        inputs=at + 1,
        kept=1,
    )


attend = sequences("gated", Recurrence, 3, again=partial(prepared, composed), prepare=_prepare)
"""``gated.serve`` in C++, for float32 or bfloat16 of any strides.

-> o (B,H,N,E) with dtype and strides of v, state (B,H,D,E) float32. All sums are in float32. Time is O(N (D E + 32 (D
+ E))). Beyond inputs, output and gradients, memory is that of one state per head, one more per 512 tokens and head
for the backward pass, and about 20 per thread. Results do not depend on the number of threads, bit for bit. Only for
operands for which ``why_not`` is empty. Raises MemoryError if the states cannot be allocated.
"""


def step(r: Recurrence, donate: bool, by_value: bool = False) -> tuple[Tensor, Tensor] | None:
    """One token of ``gated.serve`` in one pass over the state (B,H,D,E), in place with ``donate``.

    q, k (B,G,1,D), v (B,H,1,E), in float32, bfloat16 or float16, log_decay (B,H,1) or (B,H,1,D), beta (B,H,1), state
    float32 -> o (B,H,1,E) in v's dtype, state. ``by_value``: log_decay (B,H,1,E). Returns None for other operands, and
    without kernels. It runs once per token and layer, so it is written for speed.
    """
    q, k, v, log_decay, beta, state, _, _, _, scale, normalize = r
    dtype, found = v.dtype, step_sizes(r, by_value)
    if found is None or dtype not in HALVES or (beta is not None and beta.shape != (found[0], found[2], 1)):
        return None
    if dtype is not torch.float32:
        log_decay, beta = (t if t is None or t.dtype not in HALVES else t.float() for t in (log_decay, beta))
    if not readable(q, k, v, dtype=dtype, wide=(state, log_decay, beta)):
        return None
    if (library := build.loaded("gated/step")) is None:
        return None
    batch, groups, heads, keys, values = found
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    log_decay = log_decay if log_decay is None else log_decay.contiguous()
    beta = beta if beta is None else beta.contiguous()
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(v)
    failed = library.longspan_gated_step(
        state.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        None if log_decay is None else log_decay.data_ptr(),
        None if beta is None else beta.data_ptr(),
        out.data_ptr(),
        batch * heads,
        heads // groups,
        keys,
        values,
        BY_VALUE if by_value else kind(log_decay),
        normalize,
        HALVES[dtype],
        scale,
        threads(),
    )
    assert not failed
    if donate:
        mark_overwritten(state)
    return out, state


def kept_states(state: Tensor, q: Tensor, offsets: Tensor | None, keeps: bool) -> Tensor:
    """Allocate the states (B,H,spans,D,E) for the backward pass; packed sequences as gated/chunk.h counts them."""
    batch, heads, keys, values = state.shape
    if not keeps:
        return state.new_empty(0, heads, 0, keys, values)
    if offsets is not None:
        return state.new_empty(q.shape[2] // SPAN + batch, heads, 1, keys, values)
    return state.new_empty(batch, heads, -(-q.shape[2] // SPAN), keys, values)


def kind(log_decay: Tensor | None) -> int:
    """Return the number by which the kernels know the shape of the log decays."""
    return DECAYS[None if log_decay is None else log_decay.dim()]


def gate(t: Tensor | None) -> Tensor:
    """Return a gate (B,H,N) or (B,H,N,D) with four axes, for its strides; a placeholder for None."""
    return torch.empty(1, 1, 1, 1) if t is None else t if t.dim() == 4 else t[..., None]


def sizes(state: Tensor, q: Tensor, v: Tensor, flag: bool) -> "ctypes.Array[ctypes.c_long]":
    """Return the sizes for a C function: sequences, G, H, N, D, E, and a flag."""
    return (ctypes.c_long * 7)(len(state), q.shape[1], v.shape[1], *q.shape[2:], v.shape[-1], flag)
