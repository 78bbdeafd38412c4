"""Where the tokens of a call lie: the lengths of the shards, and the documents that cross their borders."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..attention.validation import real_segments
from ..ops.rows import gather_valid, pick
from .collectives import numbers


class Layout:
    """The shards of one call of a model, the same on all ranks but for ``rank``. The constructor gathers it.

    Args:
        batch: Number of rows, B.
        tokens: Number of tokens of this shard, N.
        mask: (B,N) bool, True on real tokens.
        segments: (B,N) int64, the document of each token, with the same ids on all ranks.
        group: The ranks that hold a row, in the order of its tokens.
        device: The device of the tokens.

    Raises:
        ValueError: For a shard without tokens, ids that decrease from one shard to the next, a mask on some ranks only,
            and different numbers of rows.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        mask: Tensor | None,
        segments: Tensor | None,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.plain = mask is None and segments is None
        kind = 2 * (segments is not None) + (mask is not None)
        own = torch.tensor([batch, tokens, kind], device=device)
        found = numbers(own, group).tolist()
        self.lengths = [row[1] for row in found]
        if any((rows, own_kind) != (batch, kind) for rows, _, own_kind in found):
            names = ("neither", "mask=", "segments=", "mask= and segments=")
            came = "; ".join(f"rank {r}: {rows} rows, {names[k]}" for r, (rows, _, k) in enumerate(found))
            raise ValueError(f"all ranks of a row must pass the same number of rows and the same arguments; {came}")
        if 0 in self.lengths:
            raise ValueError(f"every rank needs at least one token of each row; the shards have {self.lengths}")
        self.begin = sum(self.lengths[: self.rank])
        self.ending: Tensor | None = None
        """(B,N) the real tokens of the document that ends this shard; None for all tokens"""
        if not self.plain:
            self._read_documents(batch, tokens, mask, segments, device)

    def _read_documents(
        self, batch: int, tokens: int, mask: Tensor | None, segments: Tensor | None, device: torch.device
    ) -> None:
        self.mask = torch.ones(batch, tokens, dtype=torch.bool, device=device) if mask is None else mask
        ids = torch.zeros_like(self.mask, dtype=torch.long) if segments is None else real_segments(segments, mask)
        self.ids = ids
        self._tokens: tuple[Tensor, Tensor] | None = None
        self.ending = self.mask & (ids == ids[:, -1:])
        own = torch.stack([self.mask.sum(1), ids[:, 0], ids[:, -1], self.ending.sum(1)])
        self.real, first, last, self.ends = numbers(own, self.group).unbind(1)  # (R,B) each
        self.keeps: list[Tensor] = []
        """for each rank (B,), whether what was before its shard is in the same document as its last token"""
        self.joins: list[Tensor] = []
        """for each rank (B,), whether what was before its shard is in the same document as its first token"""
        seen, document = torch.zeros(batch, dtype=torch.bool, device=device), last[0]
        for r in range(self.size):
            some = self.real[r] > 0
            if bool((seen & some & (first[r] < document)).any()):
                raise ValueError(
                    f"segments must never decrease along a row; they do between rank {r - 1} and {r}. "
                    f"Number the documents of whole rows before sharding"
                )
            self.joins.append(~some | ~seen | (first[r] == document))
            self.keeps.append(self.joins[-1] & (~some | (first[r] == last[r])))
            document, seen = torch.where(some, last[r], document), seen | some

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Return the documents of the tokens up to the end of this shard, int64 (B,M), and which are real, bool (B,M).

        They are gathered at the first call.
        """
        if self._tokens is None:
            longest = max(self.lengths)
            own = torch.stack([self.ids, self.mask.long()])  # (2,B,N)
            every = numbers(F.pad(own, (0, longest - own.shape[2])), self.group)
            parts = [every[r, :, :, : self.lengths[r]] for r in range(self.rank + 1)]
            ids, real = torch.cat(parts, 2)
            self._tokens = ids, real.bool()
        return self._tokens

    def hops(self, rows: int) -> int:
        """Return how many ranks back the last ``rows`` real tokens before any shard reach."""
        counts = [[n] for n in self.lengths] if self.plain else self.real.tolist()
        most = 0
        for r in range(self.size):
            for row in range(len(counts[0])):
                back, found = 0, 0
                while found < rows and back < r:
                    back += 1
                    found += counts[r - back][row]
                most = max(most, back)
        return most

    def tail(self, x: Tensor, rows: int) -> Tensor:
        """Return the last ``rows`` tokens of ``ending``, after zeros: x (B,N,...) -> (B,rows,...)."""
        if self.ending is None:
            x = x[:, -rows:]
            return F.pad(x, (*(0, 0) * (x.dim() - 2), rows - x.shape[1], 0))
        at = self.ends[self.rank][:, None] - rows + torch.arange(rows, device=x.device)  # (B,rows)
        found = pick(gather_valid(self.ending, x)[0], at.clamp(min=0))
        return torch.where((at >= 0).view(*at.shape, *(1,) * (x.dim() - 2)), found, 0.0)

    def shifted(self, past: Tensor, r: int) -> Tensor:
        """Return past (B,rows,...) without the tokens that the shard of rank ``r`` pushes out, and zeros at the end."""
        rows = past.shape[1]
        if self.plain:
            gone = min(self.lengths[r], rows)
            return F.pad(past[:, gone:], (*(0, 0) * (past.dim() - 2), 0, gone))
        at = self.ends[r][:, None] + torch.arange(rows, device=past.device)
        found = pick(past, at.clamp(max=rows - 1))
        return torch.where((at < rows).view(*at.shape, *(1,) * (past.dim() - 2)), found, 0.0)

    def kept(self, state: Tensor, r: int, fill: float = 0.0) -> Tensor:
        """Return state (B,...), or ``fill`` in rows where the shard of rank ``r`` begins or holds a new document."""
        return state if self.plain else _chosen(self.keeps[r], state, fill)

    def joined(self, state: Tensor, fill: Any = 0.0) -> Tensor:
        """Return state (B,...), or ``fill`` in rows where this shard's first token begins a document."""
        return state if self.plain else _chosen(self.joins[self.rank], state, fill)

    def position(self, start: Tensor | int) -> Tensor | int:
        """Return the number of real tokens before this shard in the document of its first token: (B,), or one for all.

        ``start`` is the position of the whole row.
        """
        if self.plain:
            return start + self.begin
        at = start + torch.zeros_like(self.ends[0])
        for r in range(self.rank):
            at = self.kept(at, r, 0) + self.ends[r]
        return self.joined(at, 0)


def _chosen(rows: Tensor, state: Tensor, fill: Any) -> Tensor:
    return torch.where(rows.view(-1, *(1,) * (state.dim() - 1)), state, fill)
