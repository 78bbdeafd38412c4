"""Causal linear attention in C++: whole sequences, forward and backward, and one token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..custom_ops import kernel
from ..native import build, call
from ..native.build.openmp import threads
from ..native.call import HALVES, LARGEST, MAPS, TYPES, kernels, pointers, readable, strides
from ..operands import contiguous, mark_overwritten
from .composed import composed
from .operands import LinearOperands


def why_not(r: LinearOperands) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    if not r.causal:
        return "they are for causal attention"
    return call.why_not(r.q, r.k, r.v, r.state, r.mask, r.segments, family="linear")


def _forward(r: LinearOperands, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E+1), the denominators (B,H,N)."""
    q, k, v, state, mask, segments, feature_map, eps, *_ = r
    o, end, below = fresh_like(v), _state(q, v), _denominators(q)
    state, mask, segments = contiguous(state, mask, segments)
    failed = kernels("linear/forward").longspan_linear_forward(
        *pointers(q, k, v, o, below, state, end, mask, segments),
        strides(q, k, v, o),
        *q.shape,
        v.shape[-1],
        MAPS[feature_map],
        TYPES[v.dtype],
        eps,
        threads(),
    )
    if failed:
        raise MemoryError(f"cannot allocate the states of {q.shape[0] * q.shape[1]} heads")
    return o, end, below


def _backward(
    r: LinearOperands, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    q, k, v, state, mask, segments, feature_map, eps, *_ = r
    (grad, grad_end), (o, below) = grads, kept
    dq, dk, dv, first = fresh_like(q), fresh_like(k), fresh_like(v), _state(q, v)
    grad_end = grad_end.contiguous()
    state, mask, segments = contiguous(state, mask, segments)
    failed = kernels("linear/backward").longspan_linear_backward(
        *pointers(q, k, v, o, grad, dq, dk, dv, below, state, grad_end, first, mask, segments),
        strides(q, k, v, o, grad, dq, dk, dv),
        *q.shape,
        v.shape[-1],
        MAPS[feature_map],
        TYPES[v.dtype],
        eps,
        threads(),
    )
    if failed:
        raise MemoryError(f"cannot allocate the states of {q.shape[0] * q.shape[1]} heads")
    return [dq, dk, dv, first]


def _shapes(r: LinearOperands, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(r.v), _state(r.q, r.v), _denominators(r.q)


attend = kernel(
    "linear",
    LinearOperands,
    _forward,
    _backward,
    shapes=_shapes,
    again=composed,
    ready=lambda: call.available("linear/backward"),
    inputs=4,
    kept=1,
    saves=1,
)
"""Linear attention in C++, for float32 or bfloat16 of any strides.

-> o (B,H,N,E) with dtype and strides of v, state (B,H,D,E+1) float32. All sums are in float32. Time is
O(N (D E + 32 (D + E))). Beyond inputs, output and gradients, memory is that of two states per thread and head. The
backward pass saves q, k, v, o and the denominators (B,H,N). Results are reproducible bit for bit with the same number
of threads. Only for operands for which ``why_not`` is empty. Raises MemoryError if the states cannot be allocated.
"""


def _state(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:2], q.shape[-1], v.shape[-1] + 1, dtype=torch.float32)


def _denominators(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def step(r: LinearOperands, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token: its feature map, the sums and the normalizer, in one pass over the state.

    q, k (B,H,1,D) before the feature map, v (B,H,1,E), in float32, bfloat16 or float16, state (B,H,D,E+1) in float32
    -> o (B,H,1,E) in v's dtype, state, updated in place with ``donate``. Returns None for other operands, and without
    kernels. Equal to the torch form up to float32 rounding.
    """
    q, k, v, state, _, _, feature_map, eps, *_ = r
    feature = MAPS.get(feature_map)
    if state is None or feature is None or v.dtype not in HALVES or not q.dim() == v.dim() == 4:
        return None
    if not readable(q, k, v, dtype=v.dtype, wide=(state,)):
        return None
    batch, heads, tokens, keys = shape = q.shape
    values = v.shape[3]
    if k.shape != shape or v.shape != (batch, heads, 1, values) or state.shape != (batch, heads, keys, values + 1):
        return None
    if tokens != 1 or not batch * heads or not 0 < keys <= LARGEST or not 0 < values < LARGEST:
        return None
    if (library := build.loaded("linear/step")) is None:
        return None
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(v)
    failed = library.longspan_linear_step(
        state.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        batch * heads,
        keys,
        values,
        feature,
        eps,
        HALVES[v.dtype],
        threads(),
    )
    assert not failed
    if donate:
        mark_overwritten(state)
    return out, state
