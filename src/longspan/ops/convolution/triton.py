"""The causal convolution in Triton: sequences, forward and backward, and one token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import triton
from ..custom_ops import contiguous_like, kernel
from ..operands import contiguous, mark_overwritten, stored
from . import composed
from .operands import Convolution

MOST = 8  # taps; each shifts a block of tokens that registers hold
LONGEST = 64  # rows of a state in a step, which one block holds


def why_not(r: Convolution) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    x, weight, bias, state, _, segments, cu_seqlens, _ = r
    if reason := triton.unreadable(x, weight, bias, state, segments, cu_seqlens):
        return reason
    if any(t is not None and t.dtype not in triton.TYPES for t in (x, weight, bias, state)):
        return "they take float32, bfloat16 or float16"
    if weight.shape[1] > MOST:
        return f"they take at most {MOST} taps"
    if not x.numel() or not len(state):
        return "there is nothing to compute"
    return ""


def _forward(r: Convolution, keeps: bool) -> tuple[Tensor, Tensor]:
    """y (B,N,C), the last state (S,R,C)."""
    x, weight, bias, state, _, segments, offsets, silu = r
    kernels = _kernels()
    y, end = _result(x), contiguous_like(state)
    weight, bias, state, segments, offsets = contiguous(weight.mT, bias, state, segments, offsets)
    sizes, marks = _sizes(x, state), (segments, offsets)
    how = {"K": len(weight), "SILU": silu, "STEPS": _steps(offsets)}
    with torch.cuda.device_of(x):
        tile, grid = _tile(x, backward=False, taps=len(weight))
        kernels.forward[grid](x, y, (weight, bias), state, *marks, sizes, (x.stride(), y.stride()), **how, **tile)
        if end.numel():
            tile, grid = _state_tile(state)
            kernels.ends[grid](x, state, end, *marks, sizes, x.stride(), **tile)
    return y.to(x.dtype), end


def _backward(
    r: Convolution, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    x, weight, bias, state, _, segments, offsets, silu = r
    grad, grad_end = grads[0], grads[1].contiguous()
    kernels = _kernels()
    dtype, count = weight.dtype, weight.shape[1]
    dx, first = _result(x), _result(state, memory_format=torch.contiguous_format)
    weight, bias, state, segments, offsets = contiguous(weight.mT, bias, state, segments, offsets)
    how = {"K": count, "SILU": silu}
    with torch.cuda.device_of(x):
        tile, grid = _tile(x, backward=True, taps=count)
        sums = x.new_empty(grid[0], count + 1, x.shape[2], dtype=torch.float32)
        operands = grad_end, (weight, bias), state, segments, offsets, _sizes(x, state)
        strides = x.stride(), grad.stride()
        steps = _steps(offsets)
        kernels.backward[grid](x, grad, dx, sums, *operands, (*strides, dx.stride()), **how, STEPS=steps, **tile)
        if first.numel():
            tile, grid = _state_tile(state)
            kernels.starts[grid](x, grad, first, *operands, strides, **how, **tile)
    total = sums.sum(0)
    dbias = None if bias is None else total[count].to(bias.dtype, copy=True)
    dweight = total[:count].mT.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return [dx.to(x.dtype), dweight, dbias, first.to(state.dtype)]


attend = kernel(
    "triton_convolution",
    Convolution,
    _forward,
    _backward,
    shapes=lambda r, keeps: (torch.empty_like(r.x), contiguous_like(r.state)),
    gradient_shapes=lambda r: [torch.empty_like(r.x), *(t if t is None else contiguous_like(t) for t in r[1:4])],
    again=composed.attend,
    inputs=4,
    kept=0,
)
"""``causal_convolution`` in Triton: x (B,N,C) of any strides -> y like x, state (B,R,C) of ``state``'s dtype.

All sums are in float32. The backward pass saves only the inputs and recomputes the input of the activation. Two runs
give the same bits. ``cu_seqlens`` stays on the device and is not checked. Only for operands for which ``why_not`` is
empty.
"""


def step(r: Convolution, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token of ``causal_convolution`` in one launch, which overwrites ``state`` (B,R,C) with ``donate``.

    x (B,1,C), weight (C,K), bias (C,) or None, of any strides -> y (B,1,C), state. Returns None for other operands. It
    runs once per token and layer, so it is written for speed.
    """
    x, weight, bias, state, _, _, _, silu = r
    if torch.compiler.is_compiling() or x.dim() != 3 or state.dim() != 3:
        return None
    grad = torch.is_grad_enabled()
    for t in (x, weight, bias, state):
        if t is not None and (t.dtype not in triton.TYPES or t.is_neg() or (grad and t.requires_grad)):
            return None
    batch, tokens, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or (bias is not None and bias.shape != (channels,)):
        return None
    rows, taps = state.shape[1], weight.shape[1]
    if tokens != 1 or not batch * channels or not 0 < taps <= min(rows + 1, MOST) or rows > LONGEST:
        return None
    if state.shape != (batch, rows, channels) or state.dtype not in (torch.float32, x.dtype) or not stored(state):
        return None
    device = x.device
    if any(t is not None and t.device != device for t in (weight, bias, state)):
        return None
    if triton.unreadable(x, weight, bias, state):
        return None
    kernels = _kernels()
    after, y = state if donate else torch.empty_like(state), _result(x, memory_format=torch.contiguous_format)
    x_b, _, x_c = x.stride()
    with torch.cuda.device_of(x):
        kernels.step[batch, -(-channels // 128)](
            *(x, y, (weight, bias), state, after, channels, rows),
            ((x_b, x_c), state.stride(), after.stride(), weight.stride(), 1 if bias is None else bias.stride(0)),
            K=taps,
            SILU=silu,
            R=_power(max(rows, 1)),
            C=128,
            num_warps=4,
        )
    if donate:
        mark_overwritten(state)
    return y.to(x.dtype), after


def _kernels() -> Any:
    """Import the kernels, and with them Triton, on first use."""
    from ..triton import convolution

    return convolution


def _result(like: Tensor, **options: Any) -> Tensor:
    """Return ``torch.empty_like``, in float32 under the interpreter, which would truncate instead of rounding."""
    return torch.empty_like(like, dtype=torch.float32 if triton.interpreted() else like.dtype, **options)


def _steps(offsets: Tensor | None) -> int:
    """Return how many halvings find one of the packed sequences."""
    return 0 if offsets is None else max(len(offsets) - 2, 0).bit_length()


def _sizes(x: Tensor, state: Tensor) -> tuple[int, int, int, int]:
    return x.shape[1], x.shape[2], state.shape[1], len(state)


def _power(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _tile(x: Tensor, *, backward: bool, taps: int) -> tuple[dict[str, int], tuple[int, int]]:
    """Return tokens and channels of a block, which lie along the memory of x, and the grid of programs.

    For each number of its own, a thread holds up to 2 K - 1 shifted ones in registers: 16 of its own forward, 8
    backward, or 4 with many taps.
    """
    batch, tokens, channels = x.shape
    long, short = 64, 16 if backward and taps > 4 else 32
    width, height = (short, long) if x.stride(1) == 1 and x.stride(2) != 1 else (long, short)
    # At least two, since blocks of one number are none.
    width, height = min(width, max(_power(channels), 2)), min(height, max(_power(tokens), 2))
    tile = {"T": height, "C": width, "num_warps": 8 if backward else 4}
    return tile, (batch * -(-tokens // height), -(-channels // width))


def _state_tile(state: Tensor) -> tuple[dict[str, int], tuple[int, int]]:
    lines = len(state) * state.shape[1]
    height = min(8, max(_power(lines), 2))
    return {"T": height, "C": 64, "num_warps": 4}, (-(-lines // height), -(-state.shape[2] // 64))
