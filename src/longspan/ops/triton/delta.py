"""The states of ``gated.chunks`` from chunk to chunk, in Triton: one launch for all chunks, in either direction.

Letters as in ``gated/chunks.py``, and X counts rows, B G R of them: u (X,L,C,E), w and keys (X,L,C,D), states
(X,L,D,E). ``share`` rows have the keys of one key head. One program computes a block of E channels of a row, and holds
its state in registers. All sums are in float32, in an order that depends on no other program: two runs have the same
bits.

The state is read as it is stored, so the chunks are one after the other; what a chunk needs besides the state is loaded
ahead. No computed product is transposed: Triton 3.4 to 3.7.0 compiles that wrongly for Hopper.
"""

# The parameters of kernels have no types.
# pyright: basic
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import interpreted


@triton.jit
def _tile(rows, columns, row_stride, column_stride, height, width):
    """Return offsets and mask of a tile of a matrix (height,width)."""
    at = rows[:, None] * row_stride + columns[None, :] * column_stride
    return at, (rows[:, None] < height) & (columns[None, :] < width)


@triton.jit
def _load(x, rows, columns, row_stride, column_stride, height, width):
    at, inside = _tile(rows, columns, row_stride, column_stride, height, width)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def _store(x, value, rows, columns, row_stride, height, width):
    at, inside = _tile(rows, columns, row_stride, 1, height, width)
    tl.store(x + at, value, mask=inside)


@triton.jit
def _decayed(state, whole, row, d, channels, DECAY: tl.constexpr):
    """Return the state (BD,BE) of channels d times its remaining share after the chunk ``row``."""
    if DECAY == 0:
        return state
    elif DECAY == 1:
        return state * tl.load(whole + row)
    else:
        return state * tl.load(whole + row * channels + d, mask=d < channels, other=0.0)[:, None]


@triton.jit
def forward_kernel(
    u,  # (X,L,C,E)
    w,  # (X,L,C,D)
    keys,  # (X/share,L,C,D), times the remaining share after the chunk
    whole,  # (X,L,1 or D)
    first,  # (X,D,E)
    states,  # out: (X,L,D,E), the states before the chunks
    values,  # out: (X,L,C,E), V' = U - W S
    end,  # out: (X,D,E)
    sizes,  # L, C, D, E and share
    DELTA: tl.constexpr,  # whether there is W
    DECAY: tl.constexpr,  # 0 none, 1 per head, 2 per channel
    TURNS: tl.constexpr,  # L in the interpreter, which cannot count to a number of run time; else 0
    BC: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    TWO: tl.constexpr,  # whether the key channels are two blocks of BD
    PREC: tl.constexpr,
):
    chunks, width, channels, size, share = sizes
    row = tl.program_id(0).to(tl.int64)
    c, d, e = tl.arange(0, BC), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    dd = BD + d
    u += row * chunks * width * size
    values += row * chunks * width * size
    w += row * chunks * width * channels
    keys += row // share * chunks * width * channels
    states += row * chunks * channels * size
    first += row * channels * size
    end += row * channels * size
    state = _load(first, d, e, size, 1, channels, size)
    if TWO:
        more = _load(first, dd, e, size, 1, channels, size)
    for i in range(0, chunks if TURNS == 0 else TURNS):
        here = row * chunks + i
        new = _load(u, c, e, size, 1, width, size)
        _store(states, state, d, e, size, channels, size)
        if DELTA:
            new -= tl.dot(_load(w, c, d, channels, 1, width, channels), state, input_precision=PREC)
        if TWO:
            _store(states, more, dd, e, size, channels, size)
            if DELTA:
                new -= tl.dot(_load(w, c, dd, channels, 1, width, channels), more, input_precision=PREC)
        if DELTA:
            _store(values, new, c, e, size, width, size)
        key = _load(keys, d, c, 1, channels, channels, width)
        state = _decayed(state, whole, here, d, channels, DECAY) + tl.dot(key, new, input_precision=PREC)
        if TWO:
            key = _load(keys, dd, c, 1, channels, channels, width)
            more = _decayed(more, whole, here, dd, channels, DECAY) + tl.dot(key, new, input_precision=PREC)
        u += width * size
        values += width * size
        w += width * channels
        keys += width * channels
        states += channels * size
    _store(end, state, d, e, size, channels, size)
    if TWO:
        _store(end, more, dd, e, size, channels, size)


@triton.jit
def backward_kernel(
    upstream,  # (X,L,C,E), the gradient of V' from inside its chunk
    w,  # (X,L,C,D)
    keys,  # (X/share,L,C,D), times the remaining share after the chunk
    whole,  # (X,L,1 or D)
    reads,  # (X,L,D,E), the gradient of the states before the chunks from the outputs
    after,  # (X,D,E), the gradient of the state after the last chunk
    ahead,  # out: (X,L,D,E), the gradients of the states after the chunks
    values,  # out: (X,L,C,E), the gradient of V'
    before,  # out: (X,D,E), the gradient of the state before the first chunk
    sizes,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    TURNS: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    TWO: tl.constexpr,
    PREC: tl.constexpr,
):
    chunks, width, channels, size, share = sizes
    row = tl.program_id(0).to(tl.int64)
    c, d, e = tl.arange(0, BC), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    dd = BD + d
    # All pointers start at the last chunk.
    last = row * chunks + chunks - 1
    upstream += last * width * size
    values += last * width * size
    w += last * width * channels
    keys += (row // share * chunks + chunks - 1) * width * channels
    reads += last * channels * size
    ahead += last * channels * size
    after += row * channels * size
    before += row * channels * size
    state = _load(after, d, e, size, 1, channels, size)
    if TWO:
        more = _load(after, dd, e, size, 1, channels, size)
    for i in range(0, chunks if TURNS == 0 else TURNS):
        here = last - i
        _store(ahead, state, d, e, size, channels, size)
        if DELTA:
            new = _load(upstream, c, e, size, 1, width, size)
            new += tl.dot(_load(keys, c, d, channels, 1, width, channels), state, input_precision=PREC)
        if TWO:
            _store(ahead, more, dd, e, size, channels, size)
            if DELTA:
                new += tl.dot(_load(keys, c, dd, channels, 1, width, channels), more, input_precision=PREC)
        state = _decayed(state, whole, here, d, channels, DECAY) + _load(reads, d, e, size, 1, channels, size)
        if TWO:
            more = _decayed(more, whole, here, dd, channels, DECAY) + _load(reads, dd, e, size, 1, channels, size)
        if DELTA:
            _store(values, new, c, e, size, width, size)
            state -= tl.dot(_load(w, d, c, 1, channels, channels, width), new, input_precision=PREC)
            if TWO:
                more -= tl.dot(_load(w, dd, c, 1, channels, channels, width), new, input_precision=PREC)
        upstream -= width * size
        values -= width * size
        w -= width * channels
        keys -= width * channels
        reads -= channels * size
        ahead -= channels * size
    _store(before, state, d, e, size, channels, size)
    if TWO:
        _store(before, more, dd, e, size, channels, size)


class Tiles(NamedTuple):
    """How a kernel is compiled."""

    value_block: int  # channels of the values in a program
    warps: int
    stages: int


def tiles(channels: int, size: int) -> Tiles:
    """Return the tiles for D key channels and E value channels.

    The products of float32 as three of TF32 need many registers. More than 64 key channels are therefore two blocks of
    64, and a program has half as many value channels.
    """
    narrow = channels <= 64
    return Tiles(min(32 if narrow else 16, max(16, triton.next_power_of_2(size))), 4 if narrow else 8, 2)


def forward(
    u: Tensor, w: Tensor | None, keys: Tensor, whole: Tensor | None, first: Tensor, *, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before the chunks (X,L,D,E), the last one (X,D,E), and V' (X,L,C,E), which is u without w.

    Args:
        u: (X,L,C,E), contiguous and in float32, like all tensors here.
        w: (X,L,C,D), or None without the delta rule.
        keys: (X,L,C,D) or (X/R,L,C,D), where R rows that follow each other share their keys.
        whole: (X,L,1) or (X,L,D); None for 1.
        first: (X,D,E).
        precision: ``input_precision`` of the products.
    """
    rows, chunks, _, size = u.shape
    states, end = u.new_empty(rows, chunks, keys.shape[-1], size), torch.empty_like(first)
    values = u if w is None else torch.empty_like(u)
    _launch(forward_kernel, u, w, keys, whole, first, states, values, end, precision=precision)
    return states, end, values


def backward(
    upstream: Tensor,
    reads: Tensor,
    w: Tensor | None,
    keys: Tensor,
    whole: Tensor | None,
    after: Tensor,
    *,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the states after the chunks (X,L,D,E), of the first state (X,D,E) and of V' (X,L,C,E).

    The last is ``upstream`` itself without w, where no state enters the values.

    Args:
        upstream: (X,L,C,E), the gradient of V' from inside its chunk.
        reads: (X,L,D,E), the gradient of the states before the chunks from the outputs.
        w: As in ``forward``, like ``keys``, ``whole`` and ``precision``.
        keys: (X,L,C,D) or (X/R,L,C,D).
        whole: (X,L,1) or (X,L,D); None for 1.
        after: (X,D,E), the gradient of the state after the last chunk.
        precision: ``input_precision`` of the products.
    """
    ahead, before = torch.empty_like(reads), torch.empty_like(after)
    values = upstream if w is None else torch.empty_like(upstream)
    _launch(backward_kernel, upstream, w, keys, whole, reads, after, ahead, values, before, precision=precision)
    return ahead, before, values


def _launch(
    kernel: Any, u: Tensor, w: Tensor | None, keys: Tensor, whole: Tensor | None, *others: Tensor, precision: str
) -> None:
    """Launch a kernel for all rows and all blocks of E channels. For None it gets ``u``, which it does not read."""
    rows, chunks, width, size = u.shape
    channels = keys.shape[-1]
    tile = tiles(channels, size)
    operands = u, u if w is None else w, keys, u if whole is None else whole, *others
    kernel[(rows, triton.cdiv(size, tile.value_block))](
        *operands,
        (chunks, width, channels, size, rows // keys.shape[0]),
        DELTA=w is not None,
        DECAY=0 if whole is None else 1 if whole.shape[-1] == 1 else 2,
        TURNS=chunks if interpreted() else 0,
        BC=max(16, triton.next_power_of_2(width)),
        BD=min(64, max(16, triton.next_power_of_2(channels))),
        TWO=channels > 64,
        BE=tile.value_block,
        PREC=precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
