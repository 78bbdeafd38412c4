"""The causal convolution in C++: whole sequences, forward and backward, and one token."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..native import build, call
from ..native.build.openmp import threads
from ..native.call import HALVES, available, kernels, pointers, readable, strides
from ..operands import double_backward, mark_overwritten, stored
from ..packed import check_packed

MOST = 256  # taps and rows of a state; each thread allocates a few windows of them


def why_not(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *others: Tensor | None) -> str:
    """Return why the kernels cannot serve these operands; empty if they can. Compiles them on first use."""
    if reason := call.unreadable(x, weight, bias, state, *others):
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


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: str | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
    composed: Callable[..., Any],
) -> tuple[Tensor, Tensor]:
    """``convolution.convolve`` in C++: x (B,N,C) of any strides -> y like x, state (B,R,C) in the dtype of ``state``.

    All sums are in float32. The backward pass saves only the inputs and recomputes the input of the activation. Results
    do not depend on the number of threads, bit for bit. ``composed`` computes higher derivatives. Only for operands for
    which ``why_not`` is empty. Raises MemoryError.
    """
    kept = state.dtype
    bias = None if bias is None else bias.float()
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    options = activation, segments, offsets
    y, end = _Convolve.apply(x, weight.float(), bias, state.float(), *options, composed)
    return y, end.to(kept)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        activation: str | None,
        segments: Tensor | None,
        offsets: Tensor | None,
        composed: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        run = _forward_op if torch.compiler.is_compiling() else _forward
        y, end = run(x, weight, bias, state, activation is not None, segments, offsets)
        ctx.save_for_backward(x, weight, bias, state, segments, offsets)
        ctx.activation, ctx.composed = activation, composed
        return y, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        grad, grad_end = upstream
        *inputs, segments, offsets = ctx.saved_tensors
        if torch.is_grad_enabled() or not available("convolution/backward"):
            options: dict[str, Any] = {"activation": ctx.activation, "segments": segments, "cu_seqlens": offsets}
            grads = double_backward(ctx.composed, inputs, (grad, grad_end), **options)
        else:
            run = _backward_op if torch.compiler.is_compiling() else _backward
            given: tuple[Any, ...] = (*inputs, ctx.activation is not None, segments, offsets)
            dx, dweight, dbias, first = run(grad, grad_end, *given)
            grads = [dx, dweight, None if inputs[2] is None else dbias, first]
        return (*grads, None, None, None, None)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    silu: bool,
    segments: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y (B,N,C), the last state (B,R,C) float32."""
    check_packed(offsets, len(x), x.shape[1])
    y, end, first = fresh_like(x), torch.empty_like(state, memory_format=torch.contiguous_format), state.contiguous()
    bias, segments, offsets = (None if t is None else t.contiguous() for t in (bias, segments, offsets))
    failed = kernels("convolution/forward").longspan_convolution_forward(
        *pointers(x, y, weight, bias, first, end, segments, offsets),
        strides(x[:, None], y[:, None], weight),
        _sizes(x, weight, state),
        silu,
        HALVES[x.dtype],
        threads(),
    )
    if failed:
        raise MemoryError(f"cannot allocate the windows of {threads()} threads")
    return y, end


def _backward(
    grad: Tensor,
    grad_end: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    silu: bool,
    segments: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias and the first state from those of y and the last state."""
    library, (batch, n, channels), taps = kernels("convolution/backward"), x.shape, weight.shape[1]
    dx, first = fresh_like(x), torch.empty_like(state, memory_format=torch.contiguous_format)
    sums = weight.new_empty(batch * -(-n // library.longspan_convolution_part()), taps + 1, channels)
    grad_end, state = grad_end.contiguous(), state.contiguous()
    bias, segments, offsets = (None if t is None else t.contiguous() for t in (bias, segments, offsets))
    failed = library.longspan_convolution_backward(
        *pointers(x, grad, dx, weight, bias, state, grad_end, first, sums, segments, offsets),
        strides(x[:, None], grad[:, None], dx[:, None], weight),
        _sizes(x, weight, state),
        silu,
        HALVES[x.dtype],
        threads(),
    )
    if failed:
        raise MemoryError(f"cannot allocate the windows of {threads()} threads")
    total = sums.sum(0)
    return dx, total[:taps].mT.contiguous(), total[taps].clone(), first


def step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None, donate: bool
) -> tuple[Tensor, Tensor] | None:
    """One token of ``convolution.convolve`` in one pass over ``state`` (B,R,C), in place with ``donate``.

    x (B,1,C), weight (C,K), bias (C,) or None, of any strides -> y (B,1,C), state. Returns None for other operands, and
    without kernels. It runs once per token and layer, so it is written for speed.
    """
    dtype, kept = x.dtype, state.dtype
    if dtype not in HALVES or not (readable(x, dtype=dtype) and readable(state, dtype=kept)) or activation not in ACTS:
        return None
    if not stored(state):
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
    if not readable(weight, bias) or (library := build.loaded("convolution/step")) is None:
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
        activation is not None,
        HALVES[dtype],
        HALVES[kept],
        threads(),
    )
    if failed:
        raise MemoryError(f"cannot allocate the windows of {threads()} threads")
    if donate:
        mark_overwritten(state)
    return out, state


ACTS = (None, "silu")

_forward_op = torch.library.custom_op("longspan::convolution_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::convolution_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(*given: Any) -> tuple[Tensor, ...]:
    x, _, _, state, *_ = given
    return torch.empty_like(x), torch.empty_like(state, memory_format=torch.contiguous_format)


@_backward_op.register_fake
def _(*given: Any) -> tuple[Tensor, ...]:
    _, _, x, weight, _, state, *_ = given
    first = torch.empty_like(state, memory_format=torch.contiguous_format)
    return torch.empty_like(x), weight.new_empty(weight.shape), weight.new_empty(x.shape[-1]), first


def _sizes(x: Tensor, weight: Tensor, state: Tensor) -> "ctypes.Array[ctypes.c_long]":
    return (ctypes.c_long * 6)(*x.shape, weight.shape[1], state.shape[1], len(state))
