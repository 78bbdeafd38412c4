"""The blocks of keys that each block of queries needs, computed on tiles without the matrix of all pairs.

A tile is a block of queries and a block of keys. Each pattern returns candidate tiles, a superset of those with an
allowed pair, and whether none, some or all pairs of a tile are allowed:

* a function of i - j needs one running sum over all differences, since a tile holds a whole range of them;
* a function of j needs one over all keys;
* a pattern that gives each unit of queries a few spans of keys is counted with the ends of the spans sorted.

These counts are exact, also for combinations within one of the first two kinds. For combinations across kinds, it may
be unknown whether any or all pairs of a tile are allowed. Such tiles are tested: nine pairs of each, then all pairs, up
to ``BUDGET`` pairs. Tiles that are still unknown are listed, and not marked as full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

BUDGET = 1 << 20  # pairs that may be tested one by one
DENSE = 8  # more candidates than 1 / DENSE of all tiles cost more than all tiles


class Blocks(NamedTuple):
    """The key blocks that each query block needs."""

    size: int
    """Positions per block, counted from position 0."""
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] (a field hides tuple.index)
    """(nb, s) int64, key block numbers, ascending, padded with -1 at the end; s >= 1."""
    full: Tensor
    """(nb, s) bool, True if every pair of the two blocks is allowed, so that no mask is needed."""


class Tiled(Protocol):
    """What the lists of blocks need of a pattern."""

    @property
    def lookback(self) -> int | None: ...
    @property
    def lookahead(self) -> int | None: ...
    @property
    def kind(self) -> str: ...
    def allow(self, i: Tensor, j: Tensor, *, head: int = 0, layer: int = 0) -> Tensor: ...
    def near(self, grid: Grid) -> Tensor | None: ...
    def tiles(self, grid: Grid, blocks: Tensor) -> Certain: ...


class Spanned(Tiled, Protocol):
    """A pattern that gives each unit of ``unit`` queries a few spans of keys."""

    @property
    def unit(self) -> int: ...
    def spans(self, units: Tensor, head: int, layer: int) -> tuple[Tensor, Tensor]: ...


class Certain(NamedTuple):
    """What is known about each tile: some pair is allowed, some is not (a hole), none is, all are. Booleans."""

    some: Tensor
    hole: Tensor
    none: Tensor
    full: Tensor

    @staticmethod
    def counted(count: Tensor, pairs: Tensor) -> Certain:
        """From the number of allowed pairs, or any count that is 0 for none and ``pairs`` for all."""
        some, full = count > 0, count == pairs
        return Certain(some, ~full, ~some, full)

    def __invert__(self) -> Certain:
        return Certain(self.hole, self.some, self.full, self.none)

    def either(self, other: Certain) -> Certain:
        hole = (self.hole & other.none) | (self.none & other.hole)
        return Certain(self.some | other.some, hole, self.none & other.none, self.full | other.full)

    def both(self, other: Certain) -> Certain:
        return ~(~self).either(~other)


@dataclass(frozen=True)
class Grid:
    """Query blocks and key blocks, with the range ``low`` to ``high`` of key blocks within reach of each query block.

    Queries are at start ... total - 1, keys at 0 ... total - 1. ``rows, first, last, low, high`` are (nb, 1): the
    number of each query block, its first and last query, and the range.
    """

    size: int
    start: int
    total: int
    head: int
    layer: int
    rows: Tensor
    first: Tensor
    last: Tensor
    low: Tensor
    high: Tensor
    memo: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(n: int, size: int, start: int, head: int, layer: int) -> Grid:
        total = start + n
        rows = torch.arange(start // size, -(-total // size))[:, None]
        first = (rows * size).clamp(min=start)
        last = (rows * size + size - 1).clamp(max=total - 1)
        end = (total - 1) // size
        return Grid(size, start, total, head, layer, rows, first, last, rows * 0, torch.full_like(rows, end))

    @property
    def count(self) -> int:
        """Number of key blocks."""
        return -(-self.total // self.size)

    def narrow(self, lookback: int | None, lookahead: int | None) -> Grid:
        low = self.low if lookback is None else self.low.maximum((self.first - lookback).clamp(min=0) // self.size)
        high = self.high if lookahead is None else self.high.minimum((self.last + lookahead) // self.size)
        return replace(self, low=low, high=high)

    def once(self, pattern: Tiled, compute: Callable[[Any, Grid], T]) -> T:
        """Return ``compute(pattern, grid)``, which does not depend on the range, from a cache."""
        key = compute, pattern
        if key not in self.memo:
            self.memo[key] = compute(pattern, self)
        return self.memo[key]

    def keys(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """First and last key of key blocks."""
        begin = blocks * self.size
        return begin, (begin + self.size - 1).clamp(max=self.total - 1)


def build(pattern: Tiled, n: int, size: int, start: int, head: int, layer: int) -> Blocks:
    """Build the list for a pattern without choices by head or layer; see ``Pattern.blocks``."""
    grid = Grid.of(n, size, start, head, layer).narrow(pattern.lookback, pattern.lookahead)
    blocks, valid = _tidy(grid, pattern.near(grid))
    tiles = _settle(pattern, grid, blocks, valid, pattern.tiles(grid, blocks))
    keep = valid & ~tiles.none
    width = max(1, int(keep.sum(1).max()))
    if not bool((keep[:, 1:] & ~keep[:, :-1]).any()):
        # There are no gaps, and the columns beyond the width are all empty.
        keep = keep[:, :width]
        index = torch.where(keep, blocks[:, :width], -1)
        return Blocks(size, _wide(index, width, -1), _wide(tiles.full[:, :width] & keep, width, False))
    row, column = keep.nonzero(as_tuple=True)
    count = keep.sum(1)
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    index = torch.full((len(keep), width), -1)
    index[row, place] = blocks.expand_as(keep)[row, column]
    full = torch.zeros(len(keep), width, dtype=torch.bool)
    full[row, place] = tiles.full.expand_as(keep)[row, column]
    return Blocks(size, index, full)


def _wide(table: Tensor, width: int, filler: int | bool) -> Tensor:
    """At least ``width`` columns."""
    return table if table.shape[1] >= width else table.new_full((len(table), width), filler)


def _tidy(grid: Grid, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sort candidates (nb, s), with repeats and blocks out of reach, or None for all -> blocks, valid (nb, s).

    The blocks are ascending, (nb, s), or (1, s) if all are candidates.
    """
    begin, end = int(grid.low.min()), int(grid.high.max()) + 1
    if table is None or table.shape[1] * DENSE >= end - begin:
        blocks = torch.arange(begin, end)[None]
        return blocks, (blocks >= grid.low) & (blocks <= grid.high)
    blocks = torch.where((table >= grid.low) & (table <= grid.high), table, grid.count).sort(1).values
    valid = blocks < grid.count
    valid[:, 1:] &= blocks[:, 1:] != blocks[:, :-1]
    return blocks.clamp(max=grid.count - 1), valid


def _settle(pattern: Tiled, grid: Grid, blocks: Tensor, valid: Tensor, tiles: Certain) -> Certain:
    """Test the pairs of unknown tiles, nine of each first, as far as the budget allows."""
    for side in (3, grid.size):
        row, column = (valid & ~(tiles.none | tiles.full | (tiles.some & tiles.hole))).nonzero(as_tuple=True)
        if not len(row) or len(row) * side * side > BUDGET:
            break
        block = blocks.expand_as(valid)[row, column]
        queries = _raster(grid.first[row], grid.last[row], side)
        keys = _raster(*(end[:, None] for end in grid.keys(block)), side)
        allowed = pattern.allow(queries[:, :, None], keys[:, None], head=grid.head, layer=grid.layer)
        some, hole = allowed.flatten(1).any(1), ~allowed.flatten(1).all(1)
        tiles = Certain(*(known.expand_as(valid).clone() for known in tiles))
        tiles.some[row, column] |= some
        tiles.hole[row, column] |= hole
        if side >= grid.size:
            tiles.none[row, column] |= ~some
            tiles.full[row, column] |= ~hole
    return tiles


def _raster(first: Tensor, last: Tensor, side: int) -> Tensor:
    """``side`` positions (t, side) from first to last, (t, 1) each; all of them if there are fewer."""
    steps = torch.arange(side)
    return torch.where(
        last - first < side, (first + steps).minimum(last), first + (last - first) * steps // (side - 1 or 1)
    )


def _sums(allowed: Tensor) -> Tensor:
    """(N,) bool -> (N + 1,) running count of True, from 0."""
    return torch.nn.functional.pad(allowed.cumsum(0), (1, 0))


def _differences(pattern: Tiled, grid: Grid) -> tuple[Tensor, int]:
    """Running sums over all differences i - j for a function of them, and the least difference."""
    least = grid.start - grid.total + 1
    differences = torch.arange(least, grid.total)
    return _sums(pattern.allow(differences, torch.zeros((), dtype=torch.int64))), least


def near(pattern: Tiled, grid: Grid) -> Tensor | None:
    """``Pattern.near`` by the pattern's kind."""
    match pattern.kind:
        case "diagonal":
            return near_diagonals(pattern, grid)
        case "column":
            return near_columns(pattern, grid)
        case _:
            return near_spans(cast(Spanned, pattern), grid)


def tiles(pattern: Tiled, grid: Grid, blocks: Tensor) -> Certain:
    """``Pattern.tiles`` by the pattern's kind."""
    match pattern.kind:
        case "diagonal":
            return tiles_diagonal(pattern, grid, blocks)
        case "column":
            return tiles_columns(pattern, grid, blocks)
        case _:
            return tiles_spans(cast(Spanned, pattern), grid, blocks)


def near_diagonals(pattern: Tiled, grid: Grid) -> Tensor | None:
    sums, least = grid.once(pattern, _differences)
    size = grid.size
    apart = torch.arange(int(grid.rows[0]) - grid.count + 1, int(grid.rows[-1]) + 1)
    low, high = (apart * size - size + 1).clamp(min=least), (apart * size + size - 1).clamp(max=grid.total - 1)
    apart = apart[sums[high - least + 1] > sums[low - least]]
    return None if len(apart) * DENSE >= grid.count else grid.rows - apart.flip(0)


def tiles_diagonal(pattern: Tiled, grid: Grid, blocks: Tensor) -> Certain:
    sums, least = grid.once(pattern, _differences)

    def known(first: Tensor, last: Tensor, begin: Tensor, end: Tensor) -> Certain:
        low, high = first - end - least, last - begin - least + 1
        return Certain.counted(sums[high] - sums[low], high - low)

    begin, end = grid.keys(blocks)
    if len(blocks) == len(grid.rows):
        return known(grid.first, grid.last, begin, end)
    # All tiles. Tiles of one diagonal are equal, except for the first and last query block and the last key block,
    # which may be shorter. So each row is a slice of one line.
    rows, columns = len(grid.rows), blocks.shape[1]
    apart = (int(grid.rows[-1] - blocks[0, 0]) - torch.arange(rows + columns - 1)) * grid.size
    low = (apart - grid.size + 1).clamp(min=least) - least
    high = (apart + grid.size).clamp(max=grid.total) - least
    line = Certain.counted(sums[high] - sums[low], high - low)
    some, full = (side.unfold(0, columns, 1).flip(0) for side in (line.some, line.full))
    for rim in (0, -1):
        exact = known(grid.first[rim], grid.last[rim], begin, end)
        some[rim], full[rim] = exact.some, exact.full
    exact = known(grid.first, grid.last, begin[:, -1:], end[:, -1:])
    some[:, -1:], full[:, -1:] = exact.some, exact.full
    return Certain(some, ~full, ~some, full)


def _columns(pattern: Tiled, grid: Grid) -> tuple[Tensor, Tensor]:
    """For a function of the key: the number of allowed keys and of all keys in each key block."""
    keys = torch.arange(grid.total)
    sums = _sums(pattern.allow(torch.zeros((), dtype=torch.int64), keys))
    begin, end = grid.keys(torch.arange(grid.count))
    return sums[end + 1] - sums[begin], end + 1 - begin


def near_columns(pattern: Tiled, grid: Grid) -> Tensor:
    count, _ = grid.once(pattern, _columns)
    return count.nonzero().mT.expand(len(grid.rows), -1)


def tiles_columns(pattern: Tiled, grid: Grid, blocks: Tensor) -> Certain:
    count, pairs = grid.once(pattern, _columns)
    return Certain.counted(count[blocks], pairs[blocks])


def _spans(pattern: Spanned, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Begin and end (nb, k) of the spans of all units in each query block, empty ones at the end; number of units."""
    unit = pattern.unit
    head, tail = grid.first // unit, grid.last // unit
    units = head + torch.arange(int((tail - head).max()) + 1)
    begin, end = (x.reshape(*units.shape, -1) for x in pattern.spans(units.flatten(), grid.head, grid.layer))
    begin, end = begin.clamp(min=0), end.clamp(max=grid.total)
    missing = (begin >= end) | (units > tail)[..., None]
    begin, end = (x.masked_fill(missing, grid.total).flatten(1) for x in (begin, end))
    return begin, end, tail - head + 1


def _pieces(pattern: Spanned, grid: Grid) -> tuple[Tensor, int]:
    """First key block of each span (nb, k), and the largest number of blocks that one touches."""
    begin, end, _ = grid.once(pattern, _spans)
    head = begin // grid.size
    return head, int(((end - 1) // grid.size - head).max()) + 1


def near_spans(pattern: Spanned, grid: Grid) -> Tensor | None:
    head, most = grid.once(pattern, _pieces)
    if head.shape[1] * most * DENSE >= grid.count:
        return None
    # A span that touches fewer blocks adds blocks that are not needed.
    return (head[..., None] + torch.arange(most)).flatten(1)


def tiles_spans(pattern: Spanned, grid: Grid, blocks: Tensor) -> Certain:
    begin, end, units = grid.once(pattern, _spans)
    head, most = grid.once(pattern, _pieces)
    first, last = grid.keys(blocks)
    if len(blocks) < len(head) and head.shape[1] * most <= grid.count:
        # All tiles: add up what each span covers of each.
        count = torch.zeros(len(head), grid.count + most, dtype=torch.int64)
        for block in (head + step for step in range(most)):
            low, high = block * grid.size, (block + 1) * grid.size
            count.scatter_add_(1, block, (end.minimum(high) - begin.maximum(low)).clamp(min=0))
        return Certain.counted(count[:, blocks[0]], units * (last + 1 - first))
    ends = [(x := side.sort(1).values, torch.nn.functional.pad(x.cumsum(1), (1, 0))) for side in (begin, end)]

    def below(limit: Tensor) -> Tensor:
        """Pairs of a unit and a key before the limit: max(limit - begin, 0) - max(limit - end, 0), over all spans."""
        before = []
        for points, sums in ends:
            passed = torch.searchsorted(points, limit)
            before.append(limit * passed - sums.gather(1, passed))
        return before[0] - before[1]

    first, last = (x.expand(len(begin), -1).contiguous() for x in (first, last))
    return Certain.counted(below(last + 1) - below(first), units * (last + 1 - first))


def fold(parts: list[Certain], join: Callable[[Certain, Certain], Certain]) -> Certain:
    result = parts[0]
    for part in parts[1:]:
        result = join(result, part)
    return result
