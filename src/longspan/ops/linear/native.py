"""Causal linear attention in C++: whole sequences, forward and backward, and one token."""

from typing import Any

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..native import build
from ..native.build.openmp import threads
from ..native.call import HALVES, LARGEST, MAPS, TYPES, available, kernels, pointers, readable, strides
from ..operands import double_backward, mark_overwritten, stored
from .composed import composed


class Attend(torch.autograd.Function):
    """``causal.attend`` in C++: ``Attend.apply(q, k, v, state, mask, segments, feature_map, eps)`` -> o, state.

    q, k (B,H,N,D) before the feature map, v (B,H,N,E), any strides, float32 or bfloat16 -> o (B,H,N,E) with dtype and
    strides of v, state (B,H,D,E+1) float32. All sums are in float32. Time is O(N (D E + 32 (D + E))). Beyond inputs,
    output and gradients, memory is that of two states per thread and head. The backward pass saves q, k, v, o and the
    denominators (B,H,N). Results are reproducible bit for bit with the same number of threads. Only for operands for
    which ``call.why_not`` is empty. Raises MemoryError if the states cannot be allocated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor | None,
        mask: Tensor | None,
        segments: Tensor | None,
        feature_map: str,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        # One operation for torch.compile; eager calls skip the dispatch of the operation.
        run = _forward_op if torch.compiler.is_compiling() else _forward
        o, end, below = run(q, k, v, state, mask, segments, feature_map, eps)
        ctx.save_for_backward(q, k, v, state, mask, segments, o, below)
        ctx.options = feature_map, eps
        return o, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        grad, grad_end = upstream
        q, k, v, state, mask, segments, o, below = ctx.saved_tensors
        feature_map, eps = ctx.options
        if torch.is_grad_enabled() or not available("linear/backward"):
            options: dict[str, Any] = {"feature_map": feature_map, "eps": eps, "mask": mask, "segments": segments}
            grads = double_backward(composed, (q, k, v, state), (grad, grad_end), causal=True, **options)
        else:
            run = _backward_op if torch.compiler.is_compiling() else _backward
            *grads, first = run(grad, grad_end, q, k, v, state, mask, segments, o, below, feature_map, eps)
            grads.append(None if state is None else first)
        return (*grads, None, None, None, None)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    feature_map: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E+1), the denominators (B,H,N)."""
    o, end, below = fresh_like(v), _state(q, v), _denominators(q)
    state, mask, segments = (None if t is None else t.contiguous() for t in (state, mask, segments))
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
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    o: Tensor,
    below: Tensor,
    feature_map: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the first state from those of o and the last state."""
    dq, dk, dv, first = fresh_like(q), fresh_like(k), fresh_like(v), _state(q, v)
    grad_end = grad_end.contiguous()
    state, mask, segments = (None if t is None else t.contiguous() for t in (state, mask, segments))
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
    return dq, dk, dv, first


_forward_op = torch.library.custom_op("longspan::linear_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::linear_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    feature_map: str,
    eps: float,
) -> tuple[Tensor, ...]:
    return torch.empty_like(v), _state(q, v), _denominators(q)


@_backward_op.register_fake
def _(
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    o: Tensor,
    below: Tensor,
    feature_map: str,
    eps: float,
) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _state(q, v)


def _state(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:2], q.shape[-1], v.shape[-1] + 1, dtype=torch.float32)


def _denominators(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, feature_map: str, eps: float, donate: bool
) -> tuple[Tensor, Tensor] | None:
    """One token: its feature map, the sums and the normalizer, in one pass over the state.

    q, k (B,H,1,D) before the feature map, v (B,H,1,E), in float32, bfloat16 or float16, state (B,H,D,E+1) in float32
    -> o (B,H,1,E) in v's dtype, state, updated in place with ``donate``. Returns None for other operands, and without
    kernels. Equal to the torch form up to float32 rounding.
    """
    feature = MAPS.get(feature_map)
    if feature is None or v.dtype not in HALVES or not q.dim() == v.dim() == 4:
        return None
    if not readable(q, k, v, dtype=v.dtype) or not readable(state) or not stored(state):
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
