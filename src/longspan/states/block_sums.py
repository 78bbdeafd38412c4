"""A KV cache with the sum of each block of tokens, by which queries choose blocks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.tensors import upcast_half
from . import kv_cache
from .kv_cache import KeyValues


class BlockSums(NamedTuple):
    """The sums of blocks of tokens; the last block may have room for more."""

    keys: Tensor  # (B,G,blocks,D), float32 or better
    length: Tensor  # (B,) int64, blocks with a token


class BlockCache(NamedTuple):
    """All tokens so far, and the sums of their blocks."""

    past: KeyValues
    sums: BlockSums


def empty(batch: int, heads: int, capacity: int, dim: int, like: Tensor, width: int = 0) -> BlockCache:
    """Return a cache without tokens, whose sums have ``width`` channels (0: as the keys)."""
    past = kv_cache.empty(batch, heads, capacity, dim, like)
    sums = upcast_half(like.new_zeros(batch, heads, 0, width or dim))
    return BlockCache(past, BlockSums(sums, torch.zeros_like(past.length)))


def add(sums: Tensor | None, x: Tensor, at: Tensor, size: int, count: int) -> Tensor:
    """Return the sums of ``count`` blocks after more tokens.

    Args:
        sums: (B,G,blocks,D) earlier sums; None for whole sequences, whose first token has position 0.
        x: (B,G,N,D) tokens, zeros where they are masked.
        at: (B,N) int64, their positions; those of masked tokens may be beyond the last block.
        size: Tokens of a block.
        count: Number of blocks.
    """
    x = upcast_half(x)
    if sums is None:
        return F.pad(x, (0, 0, 0, count * size - x.shape[2])).unflatten(2, (count, size)).sum(3)
    number = (at // size).clamp(max=count - 1)[:, None, :, None].expand_as(x)
    total = x.new_zeros(*x.shape[:2], count, x.shape[-1]).scatter_add(2, number, x)
    kept = min(count, sums.shape[2])
    return torch.cat([total[:, :, :kept] + sums[:, :, :kept], total[:, :, kept:]], 2)


def after(past: KeyValues, sums: Tensor, size: int) -> BlockCache:
    """Return the state with these tokens and sums of blocks of ``size`` tokens."""
    return BlockCache(past, BlockSums(sums, -(-past.length // size)))
