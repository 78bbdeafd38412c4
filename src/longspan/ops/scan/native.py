"""The scans in C++: whole sequences, forward and backward, and one token."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..custom_ops import contiguous_like, kernel
from ..native import build, call
from ..native.build.openmp import threads
from ..native.call import HALVES, check_allocated, kernels, pointers, readable, strides
from ..operands import contiguous, mark_overwritten
from ..packed import check_packed
from . import diagonal_forms, selective_forms
from .operands import Diagonal, Selective

TILE, BLOCK = 64, 64  # tokens and channels, as in native/scan/tiles.h
MOST = 64  # states of a channel, as in native/scan/selective.cpp


def why_not(r: Diagonal | Selective) -> str:
    """Return why the kernels cannot serve these operands; empty if they can. Compiles them on first use."""
    given = [t for t in r if isinstance(t, Tensor)]
    if reason := call.unreadable(*given):
        return reason
    fixed = (r.state, r.mask, r.segments, r.cu_seqlens)
    numbers = [t for t in given if not any(t is one for one in fixed)]
    if any(t.dtype not in HALVES for t in numbers):
        return "they take float32, bfloat16 or float16"
    if not all(t.numel() for t in numbers):
        return "there is nothing to compute"
    if not call.available("scan/selective" if isinstance(r, Selective) else "scan/diagonal"):
        return "they could not be compiled"
    too_many = isinstance(r, Selective) and r.B.shape[2] > MOST
    return f"they take at most {MOST} states of a channel" if too_many else ""


def _prepare(r: Diagonal) -> Diagonal:
    return r._replace(cu_seqlens=None if r.cu_seqlens is None else r.cu_seqlens.long())


def _diagonal_forward(r: Diagonal, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y (B,N,C), the last state (B,C), and with ``keeps`` the states before every 64 tokens."""
    x, g, state, mask, segments, offsets = r
    check_packed(offsets, len(x), x.shape[1])
    assert kernels("scan/diagonal").longspan_scan_tile() == TILE
    y, end, starts = fresh_like(x), contiguous_like(state), _starts(r, keeps)
    first = state.contiguous()
    mask, segments, offsets = contiguous(mask, segments, offsets)
    failed = kernels("scan/diagonal").longspan_diagonal_forward(
        *pointers(x, g, y, first, end, starts if keeps else None, mask, segments, offsets),
        *_layout(x, g, y),
        _sizes(*x.shape, len(state)),
        threads(),
    )
    check_allocated(failed, "tiles")
    return y, end, starts


def _diagonal_backward(
    r: Diagonal, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    x, g, _, mask, segments, offsets = r
    grad, grad_end = grads[0], grads[1].contiguous()
    dx, dg, first = fresh_like(x), fresh_like(g), contiguous_like(grad_end)
    mask, segments, offsets = contiguous(mask, segments, offsets)
    failed = kernels("scan/diagonal").longspan_diagonal_backward(
        *pointers(x, g, grad, dx, dg, *kept, grad_end, first, mask, segments, offsets),
        *_layout(x, g, grad, dx, dg),
        _sizes(*x.shape, len(first)),
        threads(),
    )
    check_allocated(failed, "tiles")
    return [dx, dg, first]


diagonal = kernel(
    "diagonal",
    Diagonal,
    _diagonal_forward,
    _diagonal_backward,
    shapes=lambda r, keeps: (torch.empty_like(r.x), contiguous_like(r.state), _starts(r, keeps)),
    again=diagonal_forms.attend,
    prepare=_prepare,
    inputs=3,
    kept=1,
)
"""``diagonal_scan`` in C++ for operands of any strides -> y like x, state (B,C) float32.

All sums are in float32. Memory beyond inputs, outputs and gradients is one state per 64 tokens. Results do not depend
on the number of threads, bit for bit. Only for operands for which ``why_not`` is empty. Raises MemoryError.
"""


def diagonal_step(r: Diagonal, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token of ``diagonal_scan``: x, log_decay (B,1,C), state (B,C) float32, in place with ``donate``.

    Returns None for other operands, and without kernels. It runs once per token and layer, so it is written for speed.
    """
    x, g, state, *_ = r
    if x.dim() != 3 or x.shape[1] != 1 or x.shape != g.shape or state.shape != (len(x), x.shape[2]) or not x.numel():
        return None
    if not readable(x, g, wide=(state,)):
        return None
    if (library := build.loaded("scan/diagonal")) is None:
        return None
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x)
    library.longspan_diagonal_step(*pointers(x, g, y, state), *_layout(x, g, y), _sizes(len(x), x.shape[2]), threads())
    if donate:
        mark_overwritten(state)
    return y, state


def _prepare_selective(r: Selective) -> Selective:
    skip, bias = (None if t is None else t.float() for t in (r.D, r.dt_bias))
    offsets = None if r.cu_seqlens is None else r.cu_seqlens.long()
    return r._replace(A=None if r.A is None else r.A.float(), D=skip, dt_bias=bias, cu_seqlens=offsets)


def _selective_forward(r: Selective, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y (B,N,channels), the last state (B,channels,S), and with ``keeps`` the states before every 64 tokens."""
    x, dt, A, B, C, D, z, dt_bias, state, mask, segments, offsets, softplus = r
    check_packed(offsets, len(x), x.shape[1])
    assert kernels("scan/selective").longspan_scan_tile() == TILE
    y, end, starts = fresh_like(x), contiguous_like(state), _starts(r, keeps)
    rates, skip, bias, first = contiguous(A, D, dt_bias, state)
    mask, segments, offsets = contiguous(mask, segments, offsets)
    failed = kernels("scan/selective").longspan_selective_forward(
        *pointers(x, dt, B, C, z, y, rates, skip, bias, first, end, starts if keeps else None, mask, segments, offsets),
        *_layout(x, dt, B, C, z, y),
        _sizes(*x.shape, len(state), state.shape[2]),
        softplus,
        threads(),
    )
    check_allocated(failed, "tiles")
    return y, end, starts


def _selective_backward(
    r: Selective, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    x, dt, A, B, C, D, z, dt_bias, _, mask, segments, offsets, softplus = r
    grad, grad_end = grads[0], grads[1].contiguous()
    (batch, n, channels), (sequences, _, size) = x.shape, grad_end.shape
    dx, ddt, dz = fresh_like(x), fresh_like(dt), None if z is None else fresh_like(z)
    first = contiguous_like(grad_end)
    new = grad_end.new_empty
    shares, pairs = new(-(-channels // BLOCK), batch, n, 2, size), new(batch, n, 2, size)
    rate_sums, rates = new(sequences, channels, size), new(channels, size)
    channel_sums, others = new(2, sequences, channels), new(2, channels)
    weights = contiguous(A, D, dt_bias)
    mask, segments, offsets = contiguous(mask, segments, offsets)
    failed = kernels("scan/selective").longspan_selective_backward(
        *pointers(x, dt, B, C, z, grad, dx, ddt, dz, *weights, *kept, grad_end, first),
        *pointers(shares, rate_sums, channel_sums, pairs, rates, others, mask, segments, offsets),
        *_layout(x, dt, B, C, z, grad, dx, ddt, dz),
        _sizes(batch, n, channels, sequences, size),
        softplus,
        threads(),
    )
    check_allocated(failed, "tiles")
    db, dc = (pairs[:, :, i].to(t.dtype).contiguous() for i, t in enumerate((B, C)))
    skip = None if D is None else others[0].clone()
    bias = None if dt_bias is None else others[1].clone()
    return [dx, ddt, None if A is None else rates, db, dc, skip, dz, bias, first]


def _selective_gradient_shapes(r: Selective) -> list[Tensor | None]:
    # Those of x, dt and z have the strides of their operands, the others are contiguous.
    found = [None if t is None else contiguous_like(t) for t in r[:9]]
    found[0], found[1], found[6] = (None if t is None else torch.empty_like(t) for t in (r.x, r.dt, r.z))
    return found


selective = kernel(
    "selective",
    Selective,
    _selective_forward,
    _selective_backward,
    shapes=lambda r, keeps: (torch.empty_like(r.x), contiguous_like(r.state), _starts(r, keeps)),
    gradient_shapes=_selective_gradient_shapes,
    again=selective_forms.attend,
    prepare=_prepare_selective,
    inputs=9,
    kept=1,
)
"""``selective_scan`` in C++ for operands of any strides -> y like x, state (B,channels,S) float32.

All sums are in float32. The backward pass keeps one state per 64 tokens and computes the others again; its own memory
is S / 32 numbers per number of x. Results do not depend on the number of threads, bit for bit. Only for operands for
which ``why_not`` is empty. Raises MemoryError.
"""


def selective_step(r: Selective, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token of ``selective_scan`` in one pass over the state (B,channels,S) float32, in place with ``donate``.

    x, dt, z (B,1,channels), B, C (B,1,S) -> y (B,1,channels), state. Returns None for other operands, and without
    kernels. It runs once per token and layer, so it is written for speed.
    """
    x, dt, A, B, C, D, z, dt_bias, state, _, _, _, softplus = r
    if x.dim() != 3 or x.shape[1] != 1 or state.dim() != 3 or not state.numel():
        return None
    batch, _, channels = shape = x.shape
    size = state.shape[2]
    if dt.shape != shape or (z is not None and z.shape != shape) or size > MOST:
        return None
    if state.shape != (batch, channels, size) or B.shape != (batch, 1, size) or C.shape != (batch, 1, size):
        return None
    if A is not None and A.shape != (channels, size):
        return None
    if any(t is not None and t.shape != (channels,) for t in (D, dt_bias)):
        return None
    if not readable(x, dt, B, C, z, wide=(state,)):
        return None
    grad, weights = torch.is_grad_enabled(), []
    for t in (A, D, dt_bias):
        if t is not None:
            if t.dtype not in HALVES or (grad and t.requires_grad):
                return None
            # Detached, since a parameter is not a plain tensor.
            t = t.detach().float().contiguous()
            if not readable(t, dtype=torch.float32):
                return None
        weights.append(t)
    if (library := build.loaded("scan/selective")) is None:
        return None
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x)
    failed = library.longspan_selective_step(
        *pointers(x, dt, B, C, z, y, *weights, state),
        *_layout(x, dt, B, C, z, y),
        _sizes(batch, channels, size),
        softplus,
        threads(),
    )
    assert not failed
    if donate:
        mark_overwritten(state)
    return y, state


def _starts(r: Diagonal | Selective, keeps: bool) -> Tensor:
    """Allocate the states (tiles,...) that the backward pass starts from, as native/scan/tiles.h counts them."""
    (batch, n, _), state = r.x.shape, r.state
    tiles = 0 if not keeps else batch * -(-n // TILE) if r.cu_seqlens is None else n // TILE + len(state)
    return state.new_empty(tiles, *state.shape[1:])


def _layout(*tensors: Tensor | None) -> tuple[Any, Any]:
    """Return the strides of (B,1,N,channels) and the types of tensors (B,N,channels); placeholders for None."""
    first = tensors[0]
    assert first is not None
    given = [first if t is None else t for t in tensors]
    types = (ctypes.c_int * len(given))(*(HALVES[t.dtype] for t in given))
    return strides(*(t[:, None] for t in given)), types


def _sizes(*sizes: int) -> "ctypes.Array[ctypes.c_long]":
    return (ctypes.c_long * len(sizes))(*sizes)
