"""The base of mechanisms whose queries choose blocks of keys by what they hold."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.sparse import picked
from ..ops.tensors import merge, positions
from ..states import block_sums, kv_cache
from ..states.block_sums import BlockCache
from .cached import Cached, check_least

SCORES = 2**22  # scores of blocks in memory at a time


class Reading(NamedTuple):
    """What the queries of a call read."""

    x: Tensor  # (B,N,dim)
    q: Tensor  # (B,H,N,D)
    k: Tensor  # (B,G,N,D), of the new tokens, as v
    v: Tensor
    keys: Tensor  # (B,G,M,D), of all tokens, as values
    values: Tensor
    at: Tensor  # (B,N), the positions of the queries
    sums: Tensor  # (B,G,blocks,.), of the tokens of each block
    blocks: Tensor  # (B,H|G,N,S), those that each query chose; -1 for none
    before: Tensor | None  # (B,), the tokens before the call, if there is a state
    real: Tensor | None  # (B,N)


class Blockwise(Cached[BlockCache]):
    """A subclass calls ``choose_by`` in ``__init__``, and defines ``_summed``, ``_fits`` and ``_read``."""

    states = (BlockCache,)
    summed = 1  # sums have this many times the channels of a head

    def choose_by(self, block: int, top: int, *, least: int = 1) -> None:
        """Set the tokens of a block, and the blocks of a query, which are at least ``least``."""
        check_least(block=block)
        check_least(least, top=top)
        self.block, self.top = block, top

    def start(self, batch: int, capacity: int) -> BlockCache:
        size = self.dim // self.heads
        return block_sums.empty(batch, self.groups, capacity, size, self.weight_like, width=self.summed * size)

    def _run(
        self, x: Tensor, state: BlockCache | None, real: Tensor | None, donate: bool
    ) -> tuple[Tensor, BlockCache | None]:
        at, _ = positions(x, state and state.past.length)
        q, k, v = self.heads_of(x, at, real)
        keys, values, past, sums = k, v, None, None
        if state is not None:
            view, past = kv_cache.extend(state.past, k, v, mask=real, donate=donate)
            keys, values, sums = view.keys, view.values, state.sums.keys
        sums = block_sums.add(sums, self._summed(k, v), at, self.block, -(-keys.shape[2] // self.block))
        with torch.no_grad():
            blocks = self._choose(q, sums, at)
        q, before = q.to(keys.dtype), state and state.past.length
        o = self._read(Reading(x, q, k, v, keys, values, at, sums, blocks, before, real))
        return self.out(merge(o)), past and block_sums.after(past, sums, self.block)

    def _choose(self, q: Tensor, sums: Tensor, at: Tensor) -> Tensor:
        """The blocks of each query (B,H|G,N,S), -1 for none; of equal blocks the first."""
        number, found = torch.arange(sums.shape[2], device=q.device), []
        step = max(1, SCORES // (q.shape[0] * self.heads * len(number)))
        for some, place in zip(q.split(step, 2), at.split(step, 1), strict=True):
            own = (place // self.block)[:, None, :, None]
            fit = self._fits(some, sums, place).masked_fill(self._always(number, own), torch.inf)
            found.append(picked.largest(fit.masked_fill(number > own, -torch.inf), self.top))
        return torch.cat(found, 2)

    def _summed(self, k: Tensor, v: Tensor) -> Tensor:
        """What is summed in each block, (B,G,N,.)."""
        raise NotImplementedError(f"{type(self).__name__} defines no _summed")

    def _fits(self, q: Tensor, sums: Tensor, at: Tensor) -> Tensor:
        """How well each block fits some queries, (B,H|G,n,blocks)."""
        raise NotImplementedError(f"{type(self).__name__} defines no _fits")

    def _always(self, number: Tensor, own: Tensor) -> Tensor:
        """Whether blocks of these numbers are always chosen, if ``own`` is the query's."""
        return number == own

    def _read(self, r: Reading) -> Tensor:
        """The output (B,H,N,D)."""
        raise NotImplementedError(f"{type(self).__name__} defines no _read")
