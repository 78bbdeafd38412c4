"""The state of causal Sinkhorn attention: all tokens so far, and the statistics that sort their blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.tensors import upcast_half
from . import kv_cache


class SortedBlocks(NamedTuple):
    """All tokens so far, and what sorts their blocks; ``offers`` and ``sums`` are zero for unfinished blocks."""

    past: kv_cache.KeyValues
    total: Tensor  # (B,dim) sum of all tokens
    begun: Tensor  # (B,dim) sum of the tokens of the unfinished block
    queries: Tensor  # (B,dim) mean of the tokens up to the first one of the unfinished block
    offers: Tensor  # (B,H,blocks,D) sorting keys of the whole blocks
    sums: Tensor  # (B,H,iterations,blocks) logs of the sums of columns over the rows of whole blocks


class SortedCall(NamedTuple):
    """The U blocks that the tokens of a call may reach, starting with that of the first token.

    numbers (B,U) int64; sums (B,U,dim) of their tokens, earlier ones included; queries (B,U,dim), the means of the
    tokens up to the first one of each block.
    """

    numbers: Tensor
    sums: Tensor
    queries: Tensor


def empty(batch: int, heads: int, capacity: int, size: int, iterations: int, like: Tensor) -> SortedBlocks:
    """Return a state without tokens, with a cache of ``capacity`` slots in the dtype of ``like``, sums in float32."""
    past = kv_cache.empty(batch, heads, capacity, size, like)
    total = upcast_half(like.new_zeros(batch, heads * size))
    offers = total.new_zeros(batch, heads, 0, size)
    sums = total.new_zeros(batch, heads, iterations, 0)
    return SortedBlocks(past, total, total.clone(), total.clone(), offers, sums)


def touch(state: SortedBlocks, x: Tensor, block: int, blocks: int) -> SortedCall:
    """Sums and queries of the next ``blocks`` blocks with the tokens x (B,N,dim), zero where there is no token."""
    x, start = upcast_half(x), state.past.length
    numbers = (start // block)[:, None] + torch.arange(blocks, device=x.device)
    place = ((start % block)[:, None] + torch.arange(x.shape[1], device=x.device)) // block
    sums = x.new_zeros(len(x), blocks, x.shape[-1]).scatter_add(1, place[..., None].expand_as(x), x)
    sums = torch.cat([sums[:, :1] + state.begun[:, None], sums[:, 1:]], 1)
    # Place of the first token of each block in this call; that of the unfinished block was in an earlier call.
    first = numbers * block - start[:, None]
    so_far = state.total[:, None] + x.cumsum(1)
    index = first.clamp(0, x.shape[1] - 1)[..., None].expand_as(sums)
    means = so_far.gather(1, index) / (numbers * block + 1)[..., None]
    return SortedCall(numbers, sums, torch.where((first < 0)[..., None], state.queries[:, None], means))


def offers_of(state: SortedBlocks, call: SortedCall, new: Tensor, blocks: int) -> Tensor:
    """Offers of the state and those of the touched blocks, new (B,H,U,D), for ``blocks`` blocks: (B,H,V,D)."""
    # A block that got no token may be beyond the last one.
    room = _fit(state.offers, blocks + new.shape[2], 2)
    index = call.numbers[:, None, :, None].expand_as(new)
    return room.scatter(2, index, new.to(room.dtype))[:, :, :blocks]


def earlier(state: SortedBlocks, block: int, blocks: int, nothing: float) -> Tensor:
    """Logs of the columns' sums over the rows of whole blocks, ``nothing`` for columns without a row: (B,H,T,V)."""
    return _fit(state.sums, blocks, 3).masked_fill(~_summed(state.past.length // block, blocks), nothing)


def after(
    state: SortedBlocks, past: kv_cache.KeyValues, call: SortedCall, offers: Tensor, sums: Tensor, x: Tensor, block: int
) -> SortedBlocks:
    """Return the state after tokens x (B,N,dim), whose keys and values are in ``past``.

    offers (B,H,V,D); sums (B,H,T,1+U,V), logs of the columns' sums before each of the rows of this call and at the end.
    """
    end, blocks = past.length, min(offers.shape[2], past.keys.shape[2] // block)
    number = end // block  # of the unfinished block; there may be no token of it yet
    place = number - call.numbers[:, 0]
    index = place.clamp(max=call.sums.shape[1] - 1)[:, None, None].expand(-1, 1, x.shape[-1])
    none = (end % block == 0)[:, None]
    begun, queries = (part.gather(1, index)[:, 0].masked_fill(none, 0.0) for part in (call.sums, call.queries))
    whole = torch.arange(blocks, device=x.device) < number[:, None]
    row = place[:, None, None, None, None].expand(-1, *sums.shape[1:3], 1, blocks)
    columns = sums[..., :blocks].gather(3, row)[:, :, :, 0].masked_fill(~_summed(number, blocks), 0.0)
    offers = offers[:, :, :blocks].masked_fill(~whole[:, None, :, None], 0.0)
    return SortedBlocks(past, state.total + upcast_half(x).sum(1), begun, queries, offers, columns)


def _summed(rows: Tensor, blocks: int) -> Tensor:
    """Which columns have an entry in the first ``rows`` rows (B,), whose columns are the earlier blocks: (B,1,1,V)."""
    return (torch.arange(blocks, device=rows.device) < rows[:, None] - 1)[:, None, None]


def _fit(x: Tensor, size: int, axis: int) -> Tensor:
    """The first ``size`` entries along an axis, padded with zeros."""
    x = x.narrow(axis, 0, min(size, x.shape[axis]))
    shape = list(x.shape)
    shape[axis] = size - x.shape[axis]
    return torch.cat([x, x.new_zeros(shape)], axis)
