"""How a pattern is worked off: which blocks of queries meet which blocks of keys in one call of a dense kernel."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import patterns
from ...patterns import Pattern
from ...patterns.algebra import Both, Either, either

SMALLEST, LARGEST = 32, 128  # tokens of a block
APART = 16  # tokens between neighbors of a class from which classes pay
AT_ONCE = 256  # masks of tiles that are made at once
DENSE = 1024  # tokens of a residue class up to which its pattern may be written out


class Tiles(NamedTuple):
    """``rows`` of blocks of ``size`` queries, each with equally many blocks of keys."""

    size: int
    rows: Tensor  # (g,) int64, blocks of queries, ascending
    keys: Tensor  # (g,s) int64, blocks of keys
    mask: Tensor | None  # (g|1, size, s size) float32, 0 or -inf to be added to the logits; None: all are seen
    blind: Tensor | None  # (g|1, size) bool, queries that see none of these keys; None: there is none
    first: int  # the first row where rows are neighbors, else -1
    begin: int  # keys[u] = begin + u stride, ... + s - 1 where they are runs that move on evenly, else -1
    stride: int


class Classes(NamedTuple):
    """Tokens so many ``apart`` form classes; each class attends within itself."""

    apart: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] (a field hides tuple.count); tokens of a class
    mask: Tensor | None  # (apart|1, count, count) float32
    blind: Tensor | None  # (apart|1, count) bool


Part = Tiles | Classes


class Listed(NamedTuple):
    """Blocks of keys by block of queries, as the C++ kernels take them; all int64 and contiguous but the masks."""

    size: int
    offsets: Tensor  # (blocks + 1,)
    keys: Tensor  # (pairs of blocks,)
    which: Tensor  # (pairs of blocks,): the number of its mask, -1 where all is seen
    masks: Tensor  # (masks, size, size) uint8


@lru_cache(maxsize=64)
def plan(
    text: str, n: int, head: int, layer: int, classes_alone: bool = False, classes: bool = True
) -> tuple[int, tuple[Part, ...]]:
    """How queries and keys at positions 0 ... n-1 meet: the length to pad to, and parts whose pairs are disjoint.

    Together the parts hold every pair that the pattern allows, and each pair once. ``strided`` and ``dilated`` members
    of a union become classes of tokens (unless ``classes`` is off); all else becomes tiles, from ``Pattern.blocks``
    (unless ``classes_alone``, where ``listed`` has them).
    """
    pattern = patterns.parse(text).at(head, layer)
    near, far = _split(pattern, n) if classes else (pattern, [])
    parts: list[Part] = [] if near is None or classes_alone else list(_tiles(near, n, head, layer))
    done = near
    for apart, member in far:
        rest = member if done is None else member - done
        parts.append(_classes(rest, apart, n, head, layer))
        done = member if done is None else done | member
    length = max([_up(n, p.size if isinstance(p, Tiles) else p.apart) for p in parts], default=n)
    return length, tuple(parts)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@lru_cache(maxsize=64)
def listed(text: str, n: int, head: int, layer: int) -> Listed | None:
    """What is left beside the classes of ``plan``, or None."""
    near, _ = _split(patterns.parse(text).at(head, layer), n)
    return None if near is None else tabled(near, n, grain(near) or block_size(near, n), head, layer)


def tabled(pattern: Pattern, n: int, size: int, head: int, layer: int) -> Listed:
    """The pairs of blocks of ``size`` tokens (a multiple of 8) that a pattern needs, and the masks that differ."""
    blocks = pattern.blocks(n, size, head=head, layer=layer)
    there = blocks.index >= 0
    keys, rows = blocks.index[there], there.nonzero()[:, 0]
    partial = (~blocks.full[there]).nonzero()[:, 0]
    found, masks = torch.full_like(keys, -1), dict[bytes, int]()
    for some in partial.split(AT_ONCE):
        # Where a mask moves along with the queries, few differ.
        made = _visible(pattern, n, size, rows[some], keys[some, None], head, layer).numpy()
        packed = np.packbits(made.reshape(len(made), size * size), axis=1)
        numbers = [masks.setdefault(mask.tobytes(), len(masks)) for mask in packed]
        found[some] = torch.tensor(numbers, dtype=torch.int64)
    bits = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), size * size // 8)
    square = torch.from_numpy(np.unpackbits(bits, axis=1)).view(-1, size, size)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)])
    return Listed(size, offsets, keys.contiguous(), found, square)


def _split(pattern: Pattern, n: int) -> tuple[Pattern | None, list[tuple[int, Pattern]]]:
    """A union into what is near, and members whose pairs lie multiples of a number apart, with it."""
    near: list[Pattern] = []
    far: list[tuple[int, Pattern]] = []
    for member in members(pattern):
        # Further apart than all tokens is only the token itself.
        apart = min(member.apart, n)
        # Classes pay where tiles would have few pairs each, and where writing a class's pattern out is cheap.
        if apart >= APART and _up(n, apart) // apart <= DENSE:
            far.append((apart, member))
        else:
            near.append(member)
    return either(near) if near else None, far


def members(pattern: Pattern) -> list[Pattern]:
    """Patterns whose union this one is: ``(a | b) & c - d`` has the members ``a & c - d`` and ``b & c - d``."""
    if isinstance(pattern, Either):
        return [member for part in pattern.parts for member in members(part)]
    if isinstance(pattern, Both):
        for union in pattern.parts:
            if isinstance(union, Either):
                rest = patterns.everywhere()
                for part in pattern.parts:
                    rest = rest if part is union else rest & part
                for part in pattern.removed:
                    rest = rest - part
                return [member for part in union.parts for member in members(part & rest)]
    return [pattern]


def grain(pattern: Pattern) -> int:
    """The size of block of which the pattern is made, where that is a good size to work with; else 0."""
    return max((size for size in pattern.grains if SMALLEST <= size <= 2 * LARGEST and size % 16 == 0), default=0)


def block_size(pattern: Pattern, n: int) -> int:
    """Tokens of a block: about half the spread of a short pattern, else the largest."""
    back, ahead = pattern.lookback, pattern.lookahead
    spread = n if back is None or ahead is None else back + ahead
    size = LARGEST
    while size > SMALLEST and (size > spread or size >= 2 * n):
        size //= 2
    return size


def _tiles(pattern: Pattern, n: int, head: int, layer: int) -> Iterator[Tiles]:
    size = grain(pattern) or block_size(pattern, n)
    blocks = pattern.blocks(n, size, head=head, layer=layer)
    degrees = (blocks.index >= 0).sum(1)
    relative = torch.where(blocks.index >= 0, blocks.index - torch.arange(len(blocks.index))[:, None], n)
    moves = pattern.period
    shared = moves is not None and size % moves == 0
    cut = n // size if n % size else n  # the block that ends in padding, which no mask of a whole block hides
    for degree in degrees.unique().tolist():
        if not degree:
            continue
        rows = (degrees == degree).nonzero()[:, 0]
        for group in _groups(rows, relative[rows], (blocks.index[rows] == cut).any(1), shared):
            keys = blocks.index[group][:, :degree]
            mask = None
            if not blocks.full[group][:, :degree].all() or (keys == cut).any():
                some = group[:1] if shared else group
                mask = _mask(pattern, n, size, some, keys[: len(some)], head, layer)
            yield Tiles(size, group, keys, mask, _blind(mask), *_run(group, keys))


def _groups(rows: Tensor, relative: Tensor, cut: Tensor, shared: bool) -> Iterator[Tensor]:
    """Rows that can go together: with one mask for all, those whose keys lie at the same distances."""
    if not shared:
        yield rows
        return
    _, which = torch.cat([relative, cut[:, None]], 1).unique(dim=0, return_inverse=True)
    for kind in range(int(which.max()) + 1):
        yield rows[which == kind]


def _visible(pattern: Pattern, n: int, size: int, rows: Tensor, keys: Tensor, head: int, layer: int) -> Tensor:
    """Which of the tokens in blocks ``keys`` (g,s) those in block ``rows`` (g,) see: bool (g, size, s size)."""
    within = torch.arange(size)
    i = (rows[:, None] * size + within)[:, :, None]
    j = (keys[:, :, None] * size + within).flatten(1)[:, None, :]
    return pattern.allow(i, j, head=head, layer=layer) & (j < n)


def _mask(pattern: Pattern, n: int, size: int, rows: Tensor, keys: Tensor, head: int, layer: int) -> Tensor:
    allowed = _visible(pattern, n, size, rows, keys, head, layer)
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)


def _run(rows: Tensor, keys: Tensor) -> tuple[int, int, int]:
    """(first, begin, stride) of ``Tiles``."""
    first = int(rows[0]) if bool((rows.diff() == 1).all()) else -1
    starts, moves = keys[:, 0], keys[:, 0].diff()
    stride = int(moves[0]) if len(moves) else 0
    even = first >= 0 and bool((keys.diff(dim=1) == 1).all()) and bool((moves == stride).all()) and stride >= 0
    return (first, int(starts[0]), stride) if even else (first, -1, 0)


def _classes(pattern: Pattern, apart: int, n: int, head: int, layer: int) -> Classes:
    count = _up(n, apart) // apart
    # Where the pattern depends on the distance alone, one class stands for all but the pad at the end.
    alike = pattern.period == 1 and n % apart == 0
    start = torch.arange(1 if alike else apart)[:, None]
    at = start + apart * torch.arange(count)
    i, j = at[:, :, None], at[:, None, :]
    allowed = pattern.allow(i, j, head=head, layer=layer) & (j < n)
    mask = torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
    return Classes(apart, count, mask, _blind(mask))


def _blind(mask: Tensor | None) -> Tensor | None:
    blind = None if mask is None else (mask == -torch.inf).all(-1)
    return blind if blind is not None and blind.any() else None
