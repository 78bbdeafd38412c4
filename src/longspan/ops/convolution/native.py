"""The causal convolution in C++: whole sequences, forward and backward, and one token."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..custom_ops import contiguous_like, kernel
from ..native import build, call
from ..native.build.openmp import threads
from ..native.call import HALVES, available, check_allocated, kernels, pointers, readable, strides
from ..operands import contiguous, holds, mark_overwritten
from ..packed import check_packed
from . import composed
from .operands import Convolution

MOST = 256  # taps and rows of a state; each thread allocates a few windows of them


def why_not(r: Convolution) -> str:
    """Return why the kernels cannot serve these operands; empty if they can. Compiles them on first use."""
    x, weight, bias, state, _, segments, cu_seqlens, _ = r
    if reason := call.unreadable(x, weight, bias, state, segments, cu_seqlens):
        return reason
    if x.dtype not in HALVES:
        return "they take float32, bfloat16 or float16"
    if torch.float64 in (weight.dtype, bias.dtype if bias is not None else None):
        return "they take weights in float32 or less"
    if max(weight.shape[1], state.shape[1]) > MOST:
        return f"they take at most {MOST} taps and rows of a state"
    if not x.numel():
        return "there is nothing to compute"
    return "" if available("convolution/forward") else "they could not be compiled"


def _prepare(r: Convolution) -> Convolution:
    bias, offsets = None if r.bias is None else r.bias.float(), None if r.cu_seqlens is None else r.cu_seqlens.long()
    return r._replace(weight=r.weight.float(), bias=bias, cu_seqlens=offsets)


def _forward(r: Convolution, keeps: bool) -> tuple[Tensor, Tensor]:
    """y (B,N,C), the last state (B,R,C)."""
    x, weight, bias, state, _, segments, offsets, silu = r
    check_packed(offsets, len(x), x.shape[1])
    first = state.float().contiguous()
    y, end = fresh_like(x), torch.empty_like(first)
    bias, segments, offsets = contiguous(bias, segments, offsets)
    failed = kernels("convolution/forward").longspan_convolution_forward(
        *pointers(x, y, weight, bias, first, end, segments, offsets),
        strides(x[:, None], y[:, None], weight),
        _sizes(x, weight, state),
        silu,
        HALVES[x.dtype],
        threads(),
    )
    check_allocated(failed, "windows")
    return y, end.to(state.dtype)


def _backward(
    r: Convolution, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    x, weight, bias, state, _, segments, offsets, silu = r
    grad, grad_end = grads[0], grads[1].float().contiguous()
    library, (batch, n, channels), taps = kernels("convolution/backward"), x.shape, weight.shape[1]
    dx, before = fresh_like(x), state.float().contiguous()
    first = torch.empty_like(before)
    sums = weight.new_empty(batch * -(-n // library.longspan_convolution_part()), taps + 1, channels)
    bias, segments, offsets = contiguous(bias, segments, offsets)
    failed = library.longspan_convolution_backward(
        *pointers(x, grad, dx, weight, bias, before, grad_end, first, sums, segments, offsets),
        strides(x[:, None], grad[:, None], dx[:, None], weight),
        _sizes(x, weight, state),
        silu,
        HALVES[x.dtype],
        threads(),
    )
    check_allocated(failed, "windows")
    total = sums.sum(0)
    dbias = None if bias is None else total[taps].clone()
    return [dx, total[:taps].mT.contiguous(), dbias, first.to(state.dtype)]


attend = kernel(
    "convolution",
    Convolution,
    _forward,
    _backward,
    shapes=lambda r, keeps: (torch.empty_like(r.x), contiguous_like(r.state)),
    gradient_shapes=lambda r: [torch.empty_like(r.x), *(t if t is None else contiguous_like(t) for t in r[1:4])],
    again=composed.attend,
    ready=lambda: available("convolution/backward"),
    prepare=_prepare,
    inputs=4,
    kept=0,
)
"""``causal_convolution`` in C++: x (B,N,C) of any strides -> y like x, state (B,R,C).

All sums are in float32. The backward pass saves only the inputs and recomputes the input of the activation. Results do
not depend on the number of threads, bit for bit. Only for operands for which ``why_not`` is empty. Raises MemoryError.
"""


def step(r: Convolution, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token of ``causal_convolution`` in one pass over ``state`` (B,R,C), in place with ``donate``.

    x (B,1,C), weight (C,K), bias (C,) or None, of any strides -> y (B,1,C), state. Returns None for other operands, and
    without kernels. It runs once per token and layer, so it is written for speed.
    """
    x, weight, bias, state, _, _, _, silu = r
    dtype, kept = x.dtype, state.dtype
    if torch.compiler.is_compiling():
        return None
    if kept not in (torch.float32, dtype) or x.dim() != 3 or state.dim() != 3 or weight.dim() != 2:
        return None
    batch, tokens, channels = x.shape
    (_, rows, _), taps = state.shape, weight.shape[1]
    if tokens != 1 or not batch * channels or not 0 < taps <= rows + 1 <= MOST:
        return None
    if state.shape != (batch, rows, channels) or weight.shape[0] != channels:
        return None
    if weight.dtype not in HALVES or (torch.is_grad_enabled() and weight.requires_grad):
        return None
    # Detached, since a parameter is not a plain tensor.
    weight = weight.detach().float()
    if bias is not None:
        if bias.shape != (channels,) or bias.dtype not in HALVES or (torch.is_grad_enabled() and bias.requires_grad):
            return None
        bias = bias.detach().float().contiguous()
    if not readable(x, state, weight, bias) or not holds(state):
        return None
    if (library := build.loaded("convolution/step")) is None:
        return None
    # A clone keeps the strides of a state that does not overlap itself.
    state = state if donate else state.clone()
    out = torch.empty(batch, 1, channels, dtype=dtype)
    (a, b, c), (d, _, e), (f, g) = state.stride(), x.stride(), weight.stride()
    failed = library.longspan_convolution_step(
        state.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        (ctypes.c_long * 7)(a, b, c, d, e, f, g),
        (ctypes.c_long * 4)(batch, channels, taps, rows),
        silu,
        HALVES[dtype],
        HALVES[kept],
        threads(),
    )
    check_allocated(failed, "windows")
    if donate:
        mark_overwritten(state)
    return out, state


def _sizes(x: Tensor, weight: Tensor, state: Tensor) -> "ctypes.Array[ctypes.c_long]":
    return (ctypes.c_long * 6)(*x.shape, weight.shape[1], state.shape[1], len(state))
