"""The states of ``gated.chunks`` from chunk to chunk, in Triton: one launch for all chunks, in either direction.

Letters as in ``gated/chunks.py``, and X counts rows, B G R of them: u (X,L,C,E), w and keys (X,L,C,D), states (X,L,D,E).
``share`` rows have the keys of one key head. One program computes a block of E channels of a row, and holds its state
in registers. All sums are in float32, in an order that depends on no other program: two runs have the same bits.

The state is read as it is stored, so the chunks are one after the other; what a chunk needs besides the state is loaded
ahead. No computed product is transposed: Triton 3.4 to 3.7.0 compiles that wrongly for Hopper.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import interpreted


@triton.jit
def _whole(whole, row, i, chunks, keys, DECAY: tl.constexpr, BD: tl.constexpr):  # pyright: ignore
    """Return the share of the state that remains after chunk i, (BD,1)."""
    if DECAY == 1:
        return tl.zeros([BD, 1], tl.float32) + tl.load(whole + row * chunks + i)
    d = tl.arange(0, BD)
    return tl.load(whole + (row * chunks + i) * keys + d, mask=d < keys, other=0.0)[:, None]


@triton.jit
def forward_kernel(  # pyright: ignore
    u,  # (X,L,C,E)
    w,  # (X,L,C,D)
    keys,  # (X/share,L,C,D), times the remaining share after the chunk
    whole,  # (X,L,1 or D)
    first,  # (X,D,E)
    states,  # out: (X,L,D,E), the states before the chunks
    values,  # out: (X,L,C,E), V' = U - W S
    end,  # out: (X,D,E)
    chunks,
    width,
    channels,  # D
    size,  # E
    share,
    DELTA: tl.constexpr,  # whether there is W
    DECAY: tl.constexpr,  # 0 none, 1 per head, 2 per channel
    TURNS: tl.constexpr,  # L in the interpreter, which cannot count to a number of run time; else 0
    BC: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PREC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c, d, e = tl.arange(0, BC), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    token_value = c[:, None] * size + e[None, :]
    token_key = c[:, None] * channels + d[None, :]
    key_token = c[None, :] * channels + d[:, None]
    key_value = d[:, None] * size + e[None, :]
    is_token_value = (c[:, None] < width) & (e[None, :] < size)
    is_token_key = (c[:, None] < width) & (d[None, :] < channels)
    is_key_token = (c[None, :] < width) & (d[:, None] < channels)
    is_key_value = (d[:, None] < channels) & (e[None, :] < size)
    u += row * chunks * width * size
    values += row * chunks * width * size
    w += row * chunks * width * channels
    keys += row // share * chunks * width * channels
    states += row * chunks * channels * size
    state = tl.load(first + row * channels * size + key_value, mask=is_key_value, other=0.0)
    for i in range(0, chunks if TURNS == 0 else TURNS):
        at = tl.cast(i, tl.int64)
        tl.store(states + at * channels * size + key_value, state, mask=is_key_value)
        key = tl.load(keys + at * width * channels + key_token, mask=is_key_token, other=0.0)
        new = tl.load(u + at * width * size + token_value, mask=is_token_value, other=0.0)
        if DELTA:
            read = tl.load(w + at * width * channels + token_key, mask=is_token_key, other=0.0)
            new -= tl.dot(read, state, input_precision=PREC)
            tl.store(values + at * width * size + token_value, new, mask=is_token_value)
        if DECAY != 0:
            state *= _whole(whole, row, at, chunks, channels, DECAY, BD)
        state += tl.dot(key, new, input_precision=PREC)
    tl.store(end + row * channels * size + key_value, state, mask=is_key_value)


@triton.jit
def backward_kernel(  # pyright: ignore
    upstream,  # (X,L,C,E), the gradient of V' from inside its chunk
    reads,  # (X,L,D,E), the gradient of the states before the chunks from the outputs
    w,  # (X,L,C,D)
    keys,  # (X/share,L,C,D), times the remaining share after the chunk
    whole,  # (X,L,1 or D)
    after,  # (X,D,E), the gradient of the state after the last chunk
    ahead,  # out: (X,L,D,E), the gradients of the states after the chunks
    values,  # out: (X,L,C,E), the gradient of V'
    before,  # out: (X,D,E), the gradient of the state before the first chunk
    chunks,
    width,
    channels,
    size,
    share,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    TURNS: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PREC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c, d, e = tl.arange(0, BC), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    token_value = c[:, None] * size + e[None, :]
    token_key = c[:, None] * channels + d[None, :]
    key_token = c[None, :] * channels + d[:, None]
    key_value = d[:, None] * size + e[None, :]
    is_token_value = (c[:, None] < width) & (e[None, :] < size)
    is_token_key = (c[:, None] < width) & (d[None, :] < channels)
    is_key_token = (c[None, :] < width) & (d[:, None] < channels)
    is_key_value = (d[:, None] < channels) & (e[None, :] < size)
    upstream += row * chunks * width * size
    values += row * chunks * width * size
    w += row * chunks * width * channels
    keys += row // share * chunks * width * channels
    reads += row * chunks * channels * size
    ahead += row * chunks * channels * size
    state = tl.load(after + row * channels * size + key_value, mask=is_key_value, other=0.0)
    for i in range(0, chunks if TURNS == 0 else TURNS):
        at = chunks - 1 - tl.cast(i, tl.int64)
        tl.store(ahead + at * channels * size + key_value, state, mask=is_key_value)
        lower = tl.load(reads + at * channels * size + key_value, mask=is_key_value, other=0.0)
        if DECAY != 0:
            lower += state * _whole(whole, row, at, chunks, channels, DECAY, BD)
        else:
            lower += state
        if DELTA:
            key = tl.load(keys + at * width * channels + token_key, mask=is_token_key, other=0.0)
            new = tl.load(upstream + at * width * size + token_value, mask=is_token_value, other=0.0)
            new += tl.dot(key, state, input_precision=PREC)
            tl.store(values + at * width * size + token_value, new, mask=is_token_value)
            read = tl.load(w + at * width * channels + key_token, mask=is_key_token, other=0.0)
            lower -= tl.dot(read, new, input_precision=PREC)
        state = lower
    tl.store(before + row * channels * size + key_value, state, mask=is_key_value)


class Tiles(NamedTuple):
    """How a kernel is compiled."""

    value_block: int  # channels of the values in a program
    warps: int
    stages: int


def tiles(channels: int, size: int) -> Tiles:
    """Return the tiles for D key channels and E value channels.

    What a program loads for a chunk lies in shared memory, twice with two stages, with the state beside it: with 128
    key channels that fits into the 163 kB of compute capability 8.0 only once.
    """
    block = min(32, max(16, triton.next_power_of_2(size)))
    return Tiles(block, 4, 2 if channels <= 64 else 1)


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
    rows, chunks, width, size = u.shape
    channels = keys.shape[-1]
    states, end = u.new_empty(rows, chunks, channels, size), u.new_empty(rows, channels, size)
    values = u if w is None else torch.empty_like(u)
    tile = tiles(channels, size)
    forward_kernel[(rows, triton.cdiv(size, tile.value_block))](
        u,
        u if w is None else w,
        keys,
        u if whole is None else whole,
        first,
        states,
        values,
        end,
        chunks,
        width,
        channels,
        size,
        rows // keys.shape[0],
        **_constants(tile, u, w, keys, whole, precision),
    )
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
    rows, chunks, width, size = upstream.shape
    channels = keys.shape[-1]
    ahead, before = torch.empty_like(reads), torch.empty_like(after)
    values = upstream if w is None else torch.empty_like(upstream)
    tile = tiles(channels, size)
    backward_kernel[(rows, triton.cdiv(size, tile.value_block))](
        upstream,
        reads,
        upstream if w is None else w,
        keys,
        upstream if whole is None else whole,
        after,
        ahead,
        values,
        before,
        chunks,
        width,
        channels,
        size,
        rows // keys.shape[0],
        **_constants(tile, upstream, w, keys, whole, precision),
    )
    return ahead, before, values


def _constants(
    tile: Tiles, u: Tensor, w: Tensor | None, keys: Tensor, whole: Tensor | None, precision: str
) -> dict[str, int | bool | str]:
    return {
        "DELTA": w is not None,
        "DECAY": 0 if whole is None else 1 if whole.shape[-1] == 1 else 2,
        "TURNS": u.shape[1] if interpreted() else 0,
        "BC": max(16, triton.next_power_of_2(u.shape[2])),
        "BD": max(16, triton.next_power_of_2(keys.shape[-1])),
        "BE": tile.value_block,
        "PREC": precision,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
