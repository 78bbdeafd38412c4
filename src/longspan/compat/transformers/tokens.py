"""Convert tokens of transformers to those that a decoder reads: start tokens, masks, packed sequences."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Read(NamedTuple):
    """Input of a decoder for N given tokens, and the places of their outputs."""

    tokens: Tensor  # (B,M) int64, including start tokens
    mask: Tensor | None  # (B,M) bool, True on real tokens
    segments: Tensor | None  # (B,M) int64 of packed sequences
    places: Tensor | slice  # of the given tokens among the M: (B,N), or a slice if they are contiguous
    begins: Tensor  # (B,N) bool, True on given tokens that begin a sequence

    def outputs(self, outputs: Tensor) -> Tensor:
        """Select the outputs of the given tokens: (B,M,size) -> (B,N,size)."""
        if isinstance(self.places, slice):
            return outputs[:, self.places]
        return outputs.gather(1, self.places[..., None].expand(-1, -1, outputs.shape[-1]))


def read(ids: Tensor, start: int, *, mask: Tensor | None, positions: Tensor | None, begun: Tensor | None) -> Read:
    """Insert the start token before each sequence of ``ids`` that begins without it.

    Args:
        ids: (B,N) int64.
        start: number of the start token.
        mask: (B,N) bool, True on real tokens; None means that all are real.
        positions: ``position_ids`` (B,N) or (1,N), or None. They count up by one, and return to the smallest number of
            the row where another packed sequence begins. They have no other effect.
        begun: (B,) bool, rows that continue a state; None means no row.

    Raises:
        ValueError: positions neither count up by one nor return to the smallest number of the row.
    """
    batch, n = ids.shape
    if n == 0:
        return Read(ids, None, None, slice(0, 0), torch.zeros_like(ids, dtype=torch.bool))
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
        return Read(ids, mask, segments, slice(0, n), begins)
    if segments is None:
        # Before left padding too, because masked tokens are ignored.
        tokens, given = F.pad(ids, (1, 0), value=start), (count > 0)[:, None]
        mask = None if mask is None and bool(given.all()) else torch.cat([given, real], 1)
        return Read(tokens, mask, None, slice(1, n + 1), begins)
    length = n + int(count.max())
    places = torch.arange(n, device=ids.device) + needs.long().cumsum(1)
    tokens = ids.new_full((batch, length), start).scatter(1, places, ids)
    there = torch.zeros(batch, length, dtype=torch.bool, device=ids.device).scatter(1, places, real)
    rows, columns = needs.nonzero(as_tuple=True)
    there[rows, places[rows, columns] - 1] = True
    packs = torch.zeros_like(tokens).scatter(1, places, segments)
    packs[rows, places[rows, columns] - 1] = segments[rows, columns]
    # Slots after the last token of a shorter row belong to its last sequence.
    return Read(tokens, there, packs.cummax(1).values, places, begins)


def _restarts(positions: Tensor, real: Tensor, begun: Tensor | None) -> Tensor:
    """Return where positions (B,N) return to the smallest of their row, so that a sequence begins: bool (B,N)."""
    jump = F.pad((positions[:, 1:] != positions[:, :-1] + 1) & real[:, 1:] & real[:, :-1], (1, 0))
    first = positions.masked_fill(~real, torch.iinfo(positions.dtype).max).amin(1, keepdim=True)
    restart = real & (positions == first)
    if begun is not None:
        # The only sequence of a row may also continue at the smallest position.
        restart = restart & (jump | (positions == 0) | ~begun[:, None])
    if bool((odd := jump & ~restart).any()):
        row, column = (int(i) for i in odd.nonzero()[0])
        raise ValueError(
            f"position_ids go from {int(positions[row, column - 1])} to {int(positions[row, column])} in row {row}; "
            f"they must count up by one, or return to {int(first[row])}, the smallest of the row, at a new sequence"
        )
    return restart
