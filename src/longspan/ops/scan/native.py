"""The scans in C++: whole sequences, forward and backward, and one token."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..buffers import fresh_like
from ..native import build, call
from ..native.build.openmp import threads
from ..native.call import HALVES, kernels, pointers, readable, strides
from ..operands import double_backward, mark_overwritten, stored
from ..packed import by_sequence, check_packed
from . import diagonal_forms, selective_forms

TILE, BLOCK = 64, 64  # tokens and channels, as in native/scan/tiles.h
MOST = 64  # states of a channel, as in native/scan/selective.cpp


def why_not(
    unit: str, tokens: Sequence[Tensor | None], weights: Sequence[Tensor | None], *others: Tensor | None
) -> str:
    """Return why the kernels cannot serve these operands; empty if they can. Compiles them on first use.

    Args:
        unit: The unit of the kernels.
        tokens: Operands (B,N,...) or None.
        weights: Operands that all tokens share, or None.
        others: State, mask, segments and offsets.
    """
    if reason := call.unreadable(*tokens, *weights, *others):
        return reason
    if any(t is not None and t.dtype not in HALVES for t in (*tokens, *weights)):
        return "they take float32, bfloat16 or float16"
    if any(t is not None and not t.numel() for t in (*tokens, *weights)):
        return "there is nothing to compute"
    return "" if call.available(unit) else "they could not be compiled"


def diagonal(
    x: Tensor,
    g: Tensor,
    state: Tensor,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``scan.diagonal`` in C++: x, g (B,N,C) of any strides -> y like x, state (B,C) float32.

    All sums are in float32. Memory beyond inputs, outputs and gradients is one state per 64 tokens. Results do not
    depend on the number of threads, bit for bit. Only for operands for which ``why_not`` is empty. Raises MemoryError.
    """
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    return _Diagonal.apply(x, g, state, mask, segments, offsets)


class _Diagonal(torch.autograd.Function):
    """Takes the arguments of ``_diagonal_forward`` but ``keeps``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        run: Any = _diagonal_forward_op if torch.compiler.is_compiling() else _diagonal_forward
        y, end, starts = run(*given, any(ctx.needs_input_grad))
        ctx.save_for_backward(*given, starts)
        return y, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        x, g, state, mask, segments, offsets, starts = ctx.saved_tensors
        if torch.is_grad_enabled():
            options: dict[str, Any] = {"mask": mask, "segments": segments, "cu_seqlens": offsets}
            grads = double_backward(_diagonal_again, (x, g, state), upstream, **options)
            return (*grads, None, None, None)
        run = _diagonal_backward_op if torch.compiler.is_compiling() else _diagonal_backward
        grad, grad_end = upstream
        found = run(grad, grad_end, x, g, mask, segments, offsets, starts)
        return (*found, None, None, None)


def _diagonal_again(x: Tensor, g: Tensor, state: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return by_sequence(diagonal_forms.attend, (x, g), state, along=1, like=0, **options)


def _diagonal_forward(
    x: Tensor,
    g: Tensor,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y (B,N,C), the last state (B,C), and with ``keeps`` the states before every 64 tokens."""
    check_packed(offsets, len(x), x.shape[1])
    assert kernels("scan/diagonal").longspan_scan_tile() == TILE
    y, end, starts = fresh_like(x), _empty(state), _starts(state, x, offsets, keeps)
    first = state.contiguous()
    mask, segments, offsets = _plain(mask, segments, offsets)
    failed = kernels("scan/diagonal").longspan_diagonal_forward(
        *pointers(x, g, y, first, end, starts if keeps else None, mask, segments, offsets),
        *_layout(x, g, y),
        _sizes(*x.shape, len(state)),
        threads(),
    )
    _check(failed)
    return y, end, starts


def _diagonal_backward(
    grad: Tensor,
    grad_end: Tensor,
    x: Tensor,
    g: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, g and the first state."""
    dx, dg, first, grad_end = fresh_like(x), fresh_like(g), _empty(grad_end), grad_end.contiguous()
    mask, segments, offsets = _plain(mask, segments, offsets)
    failed = kernels("scan/diagonal").longspan_diagonal_backward(
        *pointers(x, g, grad, dx, dg, starts, grad_end, first, mask, segments, offsets),
        *_layout(x, g, grad, dx, dg),
        _sizes(*x.shape, len(first)),
        threads(),
    )
    _check(failed)
    return dx, dg, first


def diagonal_step(x: Tensor, g: Tensor, state: Tensor, *, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token of ``scan.diagonal``: x, g (B,1,C), state (B,C) float32, in place with ``donate``.

    Returns None for other operands, and without kernels. It runs once per token and layer, so it is written for speed.
    """
    if x.dim() != 3 or x.shape[1] != 1 or x.shape != g.shape or state.shape != (len(x), x.shape[2]) or not x.numel():
        return None
    if not (_readable(x) and _readable(g) and readable(state)) or not stored(state):
        return None
    if (library := build.loaded("scan/diagonal")) is None:
        return None
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x)
    library.longspan_diagonal_step(*pointers(x, g, y, state), *_layout(x, g, y), _sizes(len(x), x.shape[2]), threads())
    if donate:
        mark_overwritten(state)
    return y, state


def selective(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    *,
    softplus: bool,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``scan.selective`` in C++: operands of any strides -> y like x, state (B,channels,S) float32.

    All sums are in float32. The backward pass keeps one state per 64 tokens and computes the others again; its own
    memory is S / 32 numbers per number of x. Results do not depend on the number of threads, bit for bit. Only for
    operands for which ``why_not`` is empty. Raises MemoryError.
    """
    skip, bias = (None if t is None else t.float() for t in (D, dt_bias))
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    return _Selective.apply(x, dt, A.float(), B, C, skip, z, bias, state, mask, segments, offsets, softplus)


class _Selective(torch.autograd.Function):
    """Takes the arguments of ``_selective_forward`` but ``keeps``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        run: Any = _selective_forward_op if torch.compiler.is_compiling() else _selective_forward
        y, end, starts = run(*given, any(ctx.needs_input_grad))
        *tensors, ctx.softplus = given
        ctx.save_for_backward(*tensors, starts)
        return y, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        *inputs, mask, segments, offsets, starts = ctx.saved_tensors
        if torch.is_grad_enabled():
            options: dict[str, Any] = {"mask": mask, "segments": segments, "cu_seqlens": offsets}
            grads = double_backward(_selective_again, inputs, upstream, softplus=ctx.softplus, **options)
        else:
            run = _selective_backward_op if torch.compiler.is_compiling() else _selective_backward
            grad, grad_end = upstream
            given: tuple[Any, ...] = (*inputs[:8], mask, segments, offsets, starts, ctx.softplus)
            found = iter(run(grad, grad_end, *given))
            grads = [None if t is None else next(found) for t in inputs]
        return (*grads, None, None, None, None)


def _selective_again(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D, z, dt_bias, state = given
    options |= {"A": A, "D": D, "dt_bias": dt_bias}
    return by_sequence(selective_forms.attend, (x, dt, B, C, z), state, along=1, like=0, **options)


def _selective_forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    softplus: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y (B,N,channels), the last state (B,channels,S), and with ``keeps`` the states before every 64 tokens."""
    check_packed(offsets, len(x), x.shape[1])
    assert kernels("scan/selective").longspan_scan_tile() == TILE
    y, end, starts = fresh_like(x), _empty(state), _starts(state, x, offsets, keeps)
    rates, skip, bias, first = _plain(A, D, dt_bias, state)
    mask, segments, offsets = _plain(mask, segments, offsets)
    failed = kernels("scan/selective").longspan_selective_forward(
        *pointers(x, dt, B, C, z, y, rates, skip, bias, first, end, starts if keeps else None, mask, segments, offsets),
        *_layout(x, dt, B, C, z, y),
        _sizes(*x.shape, len(state), state.shape[2]),
        softplus,
        threads(),
    )
    _check(failed)
    return y, end, starts


def _selective_backward(
    grad: Tensor,
    grad_end: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    starts: Tensor,
    softplus: bool,
) -> list[Tensor]:
    """Return the gradients of x, dt, A, B, C, of D, z and dt_bias if given, and of the first state."""
    (batch, n, channels), (sequences, _, size) = x.shape, grad_end.shape
    dx, ddt, dz = fresh_like(x), fresh_like(dt), None if z is None else fresh_like(z)
    first, grad_end = _empty(grad_end), grad_end.contiguous()
    new = grad_end.new_empty
    shares, pairs = new(-(-channels // BLOCK), batch, n, 2, size), new(batch, n, 2, size)
    rate_sums, rates = new(sequences, channels, size), new(channels, size)
    channel_sums, others = new(2, sequences, channels), new(2, channels)
    weights = _plain(A, D, dt_bias)
    mask, segments, offsets = _plain(mask, segments, offsets)
    failed = kernels("scan/selective").longspan_selective_backward(
        *pointers(x, dt, B, C, z, grad, dx, ddt, dz, *weights, starts, grad_end, first),
        *pointers(shares, rate_sums, channel_sums, pairs, rates, others, mask, segments, offsets),
        *_layout(x, dt, B, C, z, grad, dx, ddt, dz),
        _sizes(batch, n, channels, sequences, size),
        softplus,
        threads(),
    )
    _check(failed)
    db, dc = (pairs[:, :, i].to(t.dtype).contiguous() for i, t in enumerate((B, C)))
    skip = None if D is None else others[0].clone()
    bias = None if dt_bias is None else others[1].clone()
    return [t for t in (dx, ddt, rates, db, dc, skip, dz, bias, first) if t is not None]


def selective_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    *,
    softplus: bool,
    donate: bool,
) -> tuple[Tensor, Tensor] | None:
    """One token of ``scan.selective`` in one pass over ``state`` (B,channels,S) float32, in place with ``donate``.

    x, dt, z (B,1,channels), B, C (B,1,S) -> y (B,1,channels), state. Returns None for other operands, and without
    kernels. It runs once per token and layer, so it is written for speed.
    """
    if x.dim() != 3 or x.shape[1] != 1 or state.dim() != 3 or not state.numel():
        return None
    batch, _, channels = shape = x.shape
    size = state.shape[2]
    if dt.shape != shape or (z is not None and z.shape != shape) or size > MOST:
        return None
    if state.shape != (batch, channels, size) or B.shape != (batch, 1, size) or C.shape != (batch, 1, size):
        return None
    if A.shape != (channels, size) or any(t is not None and t.shape != (channels,) for t in (D, dt_bias)):
        return None
    if not all(t is None or _readable(t) for t in (x, dt, B, C, z)) or not readable(state) or not stored(state):
        return None
    grad, weights = torch.is_grad_enabled(), []
    for t in (A, D, dt_bias):
        if t is not None:
            if t.dtype not in HALVES or (grad and t.requires_grad):
                return None
            # Detached, since a parameter is not a plain tensor.
            t = t.detach().float().contiguous()
            if not readable(t):
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


_diagonal_forward_op = torch.library.custom_op("longspan::diagonal_forward", _diagonal_forward, mutates_args=())
_diagonal_backward_op = torch.library.custom_op("longspan::diagonal_backward", _diagonal_backward, mutates_args=())
_selective_forward_op = torch.library.custom_op("longspan::selective_forward", _selective_forward, mutates_args=())
_selective_backward_op = torch.library.custom_op("longspan::selective_backward", _selective_backward, mutates_args=())


@_diagonal_forward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, _, state, _, _, offsets, keeps = given
    return torch.empty_like(x), _empty(state), _starts(state, x, offsets, keeps)


@_diagonal_backward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, grad_end, x, g, *_ = given
    return torch.empty_like(x), torch.empty_like(g), _empty(grad_end)


@_selective_forward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, *_, state, _, _, offsets, _, keeps = given
    return torch.empty_like(x), _empty(state), _starts(state, x, offsets, keeps)


@_selective_backward_op.register_fake
def _(*given: Any) -> list[Tensor]:
    _, grad_end, x, dt, A, B, C, D, z, dt_bias, *_ = given
    db, dc = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (B, C))
    rates, skip, bias = (None if t is None else _empty(t) for t in (A, D, dt_bias))
    dz = None if z is None else torch.empty_like(z)
    found = (torch.empty_like(x), torch.empty_like(dt), rates, db, dc, skip, dz, bias, _empty(grad_end))
    return [t for t in found if t is not None]


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _starts(state: Tensor, x: Tensor, offsets: Tensor | None, keeps: bool) -> Tensor:
    """Allocate the states (tiles,...) that the backward pass starts from, as native/scan/tiles.h counts them."""
    n = x.shape[1]
    tiles = 0 if not keeps else len(x) * -(-n // TILE) if offsets is None else n // TILE + len(state)
    return state.new_empty(tiles, *state.shape[1:])


def _plain(*tensors: Tensor | None) -> Sequence[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _layout(*tensors: Tensor | None) -> tuple[Any, Any]:
    """Return the strides of (B,1,N,channels) and the types of tensors (B,N,channels); placeholders for None."""
    first = tensors[0]
    assert first is not None
    given = [first if t is None else t for t in tensors]
    types = (ctypes.c_int * len(given))(*(HALVES[t.dtype] for t in given))
    return strides(*(t[:, None] for t in given)), types


def _sizes(*sizes: int) -> "ctypes.Array[ctypes.c_long]":
    return (ctypes.c_long * len(sizes))(*sizes)


def _readable(x: Tensor) -> bool:
    return x.dtype in HALVES and readable(x, dtype=x.dtype)


def _check(failed: int) -> None:
    if failed:
        raise MemoryError(f"cannot allocate the tiles of {threads()} threads")
