"""Tile sizes of the kernels of linear attention, by kernel, channels of a head, dtype and compute capability.

A table, since trying sizes at run time takes minutes and cannot be recorded in a CUDA graph. ``test_triton_compiled``
compiles each entry: no spills beyond a few registers, and shared memory within the limit of the card.
"""

from typing import NamedTuple

import torch

# Tokens of a span: more spans keep more programs busy, and cost one state each.
SHORTEST, LONGEST = 256, 2048
PROGRAMS = 512  # about four for each multiprocessor of a large GPU


class Tile(NamedTuple):
    """How one program of a kernel works."""

    chunk: int  # tokens whose products form one small matrix
    block: int  # channels of the dimension in ``SPLIT`` that a program holds, at most
    warps: int
    stages: int


# The dimension of the state that the programs of a kernel share. Each program holds all channels of the other one.
SPLIT = {"sums": "E", "outputs": "E", "grad_sums": "D", "grad_q": "D", "grad_k": "D", "grad_v": "E"}

# (up to 64 channels, bfloat16): for most kernels and capabilities. Products on Hopper use its instructions from 64
# tokens on. Three TF32 products need three times the registers of one, so float32 has smaller tiles.
_SIZES = {
    (True, True): Tile(64, 64, 4, 2),
    (False, True): Tile(64, 64, 8, 2),
    (True, False): Tile(32, 32, 4, 2),
    (False, False): Tile(16, 32, 8, 2),
}
# (kernel, up to 64 channels, bfloat16, capability 9.0 and up)
TILES: dict[tuple[str, bool, bool, bool], Tile] = {
    (kernel, small, half, hopper): _SIZES[small, half]
    for kernel in SPLIT
    for small, half in _SIZES
    for hopper in (True, False)
}
# Kernels that multiply two computed operands hold each as two of bfloat16, which would spill with 64 tokens.
for _kernel in ("outputs", "grad_q", "grad_k", "grad_v"):
    TILES[_kernel, True, True, False] = Tile(32, 64, 4, 2)
    TILES[_kernel, False, True, False] = TILES[_kernel, False, True, True] = Tile(32, 64, 8, 2)


def tile(kernel: str, d: int, e: int, dtype: torch.dtype, capability: int) -> Tile:
    """Return the tile of a kernel.

    Args:
        kernel: A key of ``SPLIT``.
        d: Channels of a key.
        e: Channels of a value.
        dtype: Of queries, keys and values.
        capability: 80 for compute capability 8.0, and so on.
    """
    return TILES[kernel, max(d, e) <= 64, dtype == torch.bfloat16, capability >= 90]


def span(tokens: int, heads: int) -> int:
    """Return the tokens of a span, a power of two, for B H ``heads``."""
    size = LONGEST
    while size > SHORTEST and heads * -(-tokens // size) < PROGRAMS:
        size //= 2
    while size > 64 and size // 2 >= tokens:
        size //= 2
    return size


def spans(tokens: int, heads: int) -> int:
    """Return the number of spans of ``span``."""
    return -(-tokens // span(tokens, heads))


def power_of_two(channels: int) -> int:
    """Return the channels of a tile that holds ``channels``: a power of two, at least 16."""
    return max(16, 1 << (channels - 1).bit_length())
