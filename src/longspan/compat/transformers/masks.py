"""Find the pattern of a mask of transformers by evaluating its mask function."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ... import patterns
from ...ops.tensors import positions
from ...patterns import Pattern

SAMPLE = 64  # rows of a mask that are compared if transformers states that nothing was added to it
ROWS = 1 << 22  # pairs that are compared in one step


@dataclass(frozen=True, eq=False, repr=False)
class Seen(BlockMask):
    """A pattern in place of a mask (B,1,N,M); queries are the last N of M tokens.

    It is a ``BlockMask`` because transformers passes one of four dimensions to the attention unchanged. A static cache
    needs that: there ``generate`` makes the mask and passes it to the model. Nothing else of ``BlockMask`` is used.
    """

    pattern: Pattern
    mask: Tensor | None  # (B,M) bool, True: a real token
    segments: Tensor | None  # (B,M) int64, packed sequences
    size: tuple[int, int]  # N, M

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B|1,1,N,M)."""
        first = self.mask if self.mask is not None else self.segments
        return 1 if first is None else len(first), 1, *self.size

    def __repr__(self) -> str:
        return f"Seen({self.pattern}, {self.shape})"

    __str__ = __repr__

    def contiguous(self) -> "Seen":
        """Return itself; some versions of transformers call it on every mask."""
        return self

    @property
    def plain(self) -> bool:
        """Whether it is the causal triangle only."""
        return self.pattern == patterns.causal() and self.mask is None and self.segments is None

    def dense(self) -> Tensor:
        """Return the equivalent bool mask (B|1,1,N,M)."""
        n, m = self.size
        first = self.mask if self.mask is not None else self.segments
        at = torch.arange(m)[None] if first is None else _positions(first.shape[0], m, self.mask, self.segments)
        allowed = self.pattern.allow(at[:, m - n :, None], at[:, None])
        if self.mask is not None:
            allowed = allowed & self.mask[:, None]
        if self.segments is not None:
            allowed = allowed & (self.segments[:, m - n :, None] == self.segments[:, None])
        return allowed[:, None]


def read(
    function: Callable,
    batch: int,
    n: int,
    m: int,
    offsets: tuple[int, int],
    padding: Tensor | None,
    local: int | None,
    whole: bool,
) -> Seen | str:
    """Return the pattern of a mask function of transformers, or why there is none.

    Args:
        function: ``function(b, head, i, j)`` of index tensors, where i and j count from ``offsets``.
        batch: number of rows.
        n: number of queries, which are the last tokens.
        m: number of keys.
        offsets: numbers of the first query and the first key.
        padding: (B,M) bool, True on real tokens; None means that all are real.
        local: size of the window or chunk that transformers passes; None means none.
        whole: compare every pair; otherwise a sample of rows, which distinguishes the masks that transformers has.
    """
    if padding is not None and padding.shape[-1] != m:
        return "the padding mask and the keys differ in length"
    if padding is not None and bool(padding.all()):
        padding = None
    if padding is not None and bool(((padding[:, 1:] & ~padding[:, :-1]).sum(-1) + padding[:, 0] > 1).any()):
        return "there is padding between tokens"
    segments = _segments(function, batch, m, offsets[1], padding) if whole else None
    at = _positions(batch, m, padding, segments)
    for pattern in _candidates(local):
        found = Seen(pattern, padding, segments, (n, m))
        if _agrees(found, function, at, n, offsets, whole):
            return found
    return "no pattern describes the mask"


def _candidates(local: int | None) -> Iterator[Pattern]:
    causal = patterns.causal()
    if local is None:
        yield causal
        yield patterns.everywhere()
        return
    yield causal & patterns.band(max(local - 1, 0))
    yield causal & patterns.block(local)
    yield patterns.band(local, local)
    yield patterns.band(max(local - 1, 0), max(local - 1, 0))


def _positions(batch: int, m: int, mask: Tensor | None, segments: Tensor | None) -> Tensor:
    """Return (B,M): the number of earlier real tokens in each token's sequence."""
    return positions(torch.empty(batch, m, 0), mask=mask, segments=segments)[0]


def _segments(function: Callable, batch: int, m: int, offset: int, padding: Tensor | None) -> Tensor | None:
    """Return packed sequences, which begin where a token does not see the previous one; None if there is only one."""
    i = torch.arange(1, m) + offset
    rows = torch.arange(batch)[:, None]
    border = ~function(rows, torch.tensor(0), i[None], i[None] - 1).bool().expand(batch, m - 1)
    if padding is not None:
        border = border & padding[:, 1:] & padding[:, :-1]
    return torch.nn.functional.pad(border.long().cumsum(-1), (1, 0)) if bool(border.any()) else None


def _agrees(found: Seen, function: Callable, at: Tensor, n: int, offsets: tuple[int, int], whole: bool) -> bool:
    batch, m = at.shape
    step = max(ROWS // m, 1)
    j = torch.arange(m)
    for b in range(batch):
        rows = torch.arange(m - n, m)
        if found.mask is not None:
            rows = rows[found.mask[b, rows]]
        if not whole and len(rows) > SAMPLE:
            rows = rows[torch.linspace(0, len(rows) - 1, SAMPLE).long()]
        keys = j if found.mask is None else j[found.mask[b]]
        for part in rows.split(step):
            i = (part - (m - n) + offsets[0])[:, None]
            theirs = function(torch.tensor(b), torch.tensor(0), i, (keys + offsets[1])[None])
            ours = found.pattern.allow(at[b, part][:, None], at[b, keys][None])
            if found.segments is not None:
                ours = ours & (found.segments[b, part][:, None] == found.segments[b, keys][None])
            if not torch.equal(
                torch.as_tensor(theirs).bool().expand(len(part), len(keys)), ours.expand(len(part), len(keys))
            ):
                return False
        if not whole and found.mask is None:
            break  # all rows of a batch are alike
    return True
