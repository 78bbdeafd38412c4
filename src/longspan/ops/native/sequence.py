"""Causal linear attention over whole sequences by the C++ kernels, forward and backward."""

import ctypes

import torch
from torch import Tensor

from ..operands import TRANSFORMED, transformed
from ..pages import fresh_like
from ..plain import differentiable_backward
from . import MAPS, available, build, threads

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in forward.cpp


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *others: Tensor | None,
) -> str:
    """Why the kernels cannot serve these operands; "" where they can. Compiles them on first use."""
    given = [t for t in (q, k, v, state, *others) if t is not None]
    if torch.compiler.is_exporting():
        return "an exported program must run without them"
    # Classes with a dispatch of their own, such as fake tensors, may have no memory to read.
    if not torch.compiler.is_compiling() and (
        torch._C._len_torch_dispatch_stack()
        or any(type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in given)  # type: ignore
    ):
        return "what counts or traces the operations of torch would see none of theirs"
    if transformed():
        return TRANSFORMED
    if any(t.device.type != "cpu" for t in given):
        return "they are for the CPU"
    if any(t.dtype not in TYPES or t.dtype != v.dtype for t in (q, k, v)):
        return "they take float32 or bfloat16, one of them for queries, keys and values"
    if state is not None and state.dtype != torch.float32:
        return "they take a state in float32"
    if not (q.numel() and v.numel()):
        return "there is nothing to compute"
    return "" if available() else "the kernels could not be compiled"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    eps: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``spans.attend`` in C++: q, k (B,H,N,D) before the feature map, v (B,H,N,E), of any strides, float32 or bfloat16.

    -> o (B,H,N,E) in v's dtype and with its strides, state (B,H,D,E+1) float32, in which all sums are made. Time is
    O(N (D E + 32 (D + E))); beyond inputs, output and gradients, memory is that of two states per thread and head: the
    backward pass keeps q, k, v, o and the denominators (B,H,N). The same number of threads gives the same bits.
    Only for operands that ``why_not`` does not object to. Raises MemoryError where those states do not fit.
    """
    return _Attend.apply(q, k, v, state, mask, segments, feature_map, eps)  # type: ignore[return-value]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, state, mask, segments, feature_map, eps):
        # To a compiler it is one operation; without one, the operation's dispatch is saved.
        run = _forward_op if torch.compiler.is_compiling() else _forward
        o, end, below = run(q, k, v, state, mask, segments, feature_map, eps)
        ctx.save_for_backward(q, k, v, state, mask, segments, o, below)
        ctx.options = feature_map, eps
        return o, end

    @staticmethod
    def backward(ctx, grad, grad_end):
        q, k, v, state, mask, segments, o, below = ctx.saved_tensors
        feature_map, eps = ctx.options
        if torch.is_grad_enabled():
            options = {"feature_map": feature_map, "eps": eps, "mask": mask, "segments": segments}
            grads = differentiable_backward((q, k, v, state), (grad, grad_end), causal=True, **options)
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
    failed = _kernels().longspan_linear_forward(
        *pointers(q, k, v, o, below, state, end, mask, segments), strides(q, k, v, o), *q.shape, v.shape[-1],
        MAPS[feature_map], TYPES[v.dtype], eps, threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the states of {q.shape[0] * q.shape[1]} heads")
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
    """The gradients of q, k, v and the first state, from those of o and the last state."""
    dq, dk, dv, first = fresh_like(q), fresh_like(k), fresh_like(v), _state(q, v)
    grad_end = grad_end.contiguous()
    state, mask, segments = (None if t is None else t.contiguous() for t in (state, mask, segments))
    failed = _kernels().longspan_linear_backward(
        *pointers(q, k, v, o, grad, dq, dk, dv, below, state, grad_end, first, mask, segments),
        strides(q, k, v, o, grad, dq, dk, dv), *q.shape, v.shape[-1],
        MAPS[feature_map], TYPES[v.dtype], eps, threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the states of {q.shape[0] * q.shape[1]} heads")
    return dq, dk, dv, first


_forward_op = torch.library.custom_op("longspan::linear_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::linear_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(q, k, v, state, mask, segments, feature_map, eps):
    return torch.empty_like(v), _state(q, v), _denominators(q)


@_backward_op.register_fake
def _(grad, grad_end, q, k, v, state, mask, segments, o, below, feature_map, eps):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _state(q, v)


def _state(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:2], q.shape[-1], v.shape[-1] + 1, dtype=torch.float32)


def _denominators(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _kernels() -> ctypes.CDLL:
    kernels = build.loaded()
    assert kernels is not None
    return kernels


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Where their numbers begin, as a C function takes it; null for None."""
    return [None if t is None else t.data_ptr() for t in tensors]


def strides(*tensors: Tensor) -> ctypes.Array:
    """All their strides, in elements, one tensor after the other."""
    flat = [stride for t in tensors for stride in t.stride()]
    return (ctypes.c_long * len(flat))(*flat)
