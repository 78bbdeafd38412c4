"""From the tokens that transformers hands over to those that a decoder reads: start tokens, masks, packed sequences."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Read(NamedTuple):
    """What a decoder reads for N given tokens, and where their outputs are."""

    tokens: Tensor  # (B,M) int64, start tokens included
    mask: Tensor | None  # (B,M) bool, True on real tokens
    segments: Tensor | None  # (B,M) int64 of packed sequences
    places: Tensor | slice  # of the given tokens among the M: (B,N), or a slice where they lie side by side

    def outputs(self, outputs: Tensor) -> Tensor:
        """Those of the given tokens: (B,M,size) -> (B,N,size)."""
        if isinstance(self.places, slice):
            return outputs[:, self.places]
        return outputs.gather(1, self.places[..., None].expand(-1, -1, outputs.shape[-1]))


def read(ids: Tensor, start: int, *, mask: Tensor | None, positions: Tensor | None, begun: Tensor | None) -> Read:
    """Lay out ids (B,N) for a decoder: where a sequence begins without the ``start`` token, that is put before it.

    mask (B,N) bool or None: True on real tokens. ``positions`` (B,N) or (1,N), or None: transformers' ``position_ids``,
    which count up by one, and go back to the smallest number of the row where another packed sequence begins. They say
    no more than that. ``begun`` (B,) bool: rows that go on with a state; None: no row does.
    Raises ValueError for positions that do neither.
    """
    batch, n = ids.shape
    if n == 0:
        return Read(ids, None, None, slice(0, 0))
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    first = real & (real.long().cumsum(1) == 1)
    begins = first if begun is None else first & ~begun[:, None]
    segments = None
    if positions is not None:
        packed = begins | _restarts(positions.expand(batch, n).long(), real, begun)
        if bool((packed != begins).any()):
            begins, segments = packed, packed.long().cumsum(1)
    needs = begins & (ids != start)
    count = needs.sum(1)
    if not bool(count.any()):
        return Read(ids, mask, segments, slice(0, n))
    if segments is None:
        # In front of padding too: a token that is not real is not there.
        tokens, given = F.pad(ids, (1, 0), value=start), (count > 0)[:, None]
        mask = None if mask is None and bool(given.all()) else torch.cat([given, real], 1)
        return Read(tokens, mask, None, slice(1, n + 1))
    length = n + int(count.max())
    places = torch.arange(n, device=ids.device) + needs.long().cumsum(1)
    tokens = ids.new_full((batch, length), start).scatter(1, places, ids)
    there = torch.zeros(batch, length, dtype=torch.bool, device=ids.device).scatter(1, places, real)
    rows, columns = needs.nonzero(as_tuple=True)
    there[rows, places[rows, columns] - 1] = True
    packs = torch.zeros_like(tokens).scatter(1, places, segments)
    packs[rows, places[rows, columns] - 1] = segments[rows, columns]
    # What lies behind the last token of a shorter row belongs to its last sequence.
    return Read(tokens, there, packs.cummax(1).values, places)


def _restarts(positions: Tensor, real: Tensor, begun: Tensor | None) -> Tensor:
    """Where a sequence begins, by positions (B,N) that go back to the smallest of their row: bool (B,N)."""
    jump = F.pad((positions[:, 1:] != positions[:, :-1] + 1) & real[:, 1:] & real[:, :-1], (1, 0))
    first = positions.masked_fill(~real, torch.iinfo(positions.dtype).max).amin(1, keepdim=True)
    restart = real & (positions == first)
    if begun is not None:
        # The smallest is also where the only sequence of a row goes on.
        restart = restart & (jump | (positions == 0) | ~begun[:, None])
    if bool((odd := jump & ~restart).any()):
        row, column = (int(i) for i in odd.nonzero()[0])
        raise ValueError(
            f"position_ids go from {int(positions[row, column - 1])} to {int(positions[row, column])} in row {row}; "
            f"they must count up by one, or go back to {int(first[row])}, the smallest of the row, at a new sequence"
        )
    return restart
