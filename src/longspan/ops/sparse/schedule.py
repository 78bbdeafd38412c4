"""Plans of sparse attention: the blocks of queries and keys that each call of a dense kernel processes."""

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
APART = 16  # smallest distance between neighbors of a class for which classes are faster
AT_ONCE = 256  # masks of tiles computed at a time
DENSE = 1024  # largest number of tokens of a residue class whose mask is stored


class Tiles(NamedTuple):
    """Blocks of ``size`` queries, each with the same number of key blocks.

    On a GPU a mask is bool, True where a pair is hidden: a quarter of the memory, and as many kernels.
    """

    size: int
    rows: Tensor  # (g,) int64, blocks of queries, ascending
    keys: Tensor  # (g,s) int64, blocks of keys
    mask: Tensor | None  # (g|1, size, s size) float32, 0 or -inf, added to the logits; None: all pairs are allowed
    blind: Tensor | None  # (g|1, size) bool, queries that see none of these keys; None: every query sees one
    first: int  # the first of consecutive rows, else -1
    begin: int  # keys[u] = begin + u stride, ... + s - 1 if they are evenly shifted runs, else -1
    stride: int


class Classes(NamedTuple):
    """Residue classes of tokens modulo ``apart``; each class attends within itself."""

    apart: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] (a field hides tuple.count); tokens of a class
    mask: Tensor | None  # (apart|1, count, count) float32
    blind: Tensor | None  # (apart|1, count) bool


Part = Tiles | Classes


class Listed(NamedTuple):
    """Blocks of keys of each block of queries, in the layout of the C++ kernels; contiguous int64, except the masks."""

    size: int
    offsets: Tensor  # (blocks + 1,)
    keys: Tensor  # (pairs of blocks,)
    which: Tensor  # (pairs of blocks,): index of its mask, -1 if all pairs are allowed
    masks: Tensor  # (masks, size, size) uint8


@lru_cache(maxsize=64)
def plan(
    text: str, n: int, head: int, layer: int, classes_alone: bool = False, classes: bool = True
) -> tuple[int, tuple[Part, ...]]:
    """Split a pattern over n tokens into parts that together hold each allowed pair exactly once.

    ``strided`` and ``dilated`` members of a union become classes of tokens. The rest becomes tiles, from
    ``Pattern.blocks``.

    Args:
        text: Spec of the pattern.
        n: Number of tokens, at positions 0 ... n - 1.
        head: The head, for patterns that differ by head.
        layer: The layer, for patterns that differ by layer.
        classes_alone: Leave out the tiles, which ``listed`` returns.
        classes: Use classes of tokens; False: only tiles.

    Returns:
        The length to pad to, and the parts.
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


@lru_cache(maxsize=64)
def placed(
    text: str, n: int, head: int, layer: int, classes_alone: bool, device: torch.device
) -> tuple[int, tuple[Part, ...]]:
    """Return ``plan`` with its tensors on a device, where they stay for later calls."""
    length, parts = plan(text, n, head, layer, classes_alone)
    if device.type == "cpu":
        return length, parts
    # The first call may be in inference mode, and a later one in training.
    with torch.inference_mode(False):
        return length, tuple(_moved(part, device) for part in parts)


def _moved(part: Part, device: torch.device) -> Part:
    mask = None if part.mask is None else (part.mask < 0).to(device)
    blind = None if part.blind is None else part.blind.to(device)
    if isinstance(part, Classes):
        return part._replace(mask=mask, blind=blind)
    return part._replace(rows=part.rows.to(device), keys=part.keys.to(device), mask=mask, blind=blind)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@lru_cache(maxsize=64)
def listed(text: str, n: int, head: int, layer: int) -> Listed | None:
    """Return the blocks of what is not in the classes of ``plan``, or None if nothing is left."""
    near, _ = _split(patterns.parse(text).at(head, layer), n)
    return None if near is None else tabled(near, n, grain(near) or block_size(near, n), head, layer)


def tabled(pattern: Pattern, n: int, size: int, head: int, layer: int) -> Listed:
    """List the pairs of blocks of ``size`` tokens (a multiple of 8) that a pattern needs, with distinct masks."""
    blocks = pattern.blocks(n, size, head=head, layer=layer)
    there = blocks.index >= 0
    keys, rows = blocks.index[there], there.nonzero()[:, 0]
    partial = (~blocks.full[there]).nonzero()[:, 0]
    found, masks = torch.full_like(keys, -1), dict[bytes, int]()
    for some in partial.split(AT_ONCE):
        # If the pattern depends on distances, few masks are distinct.
        made = _visible(pattern, n, size, rows[some], keys[some, None], head, layer).numpy()
        packed = np.packbits(made.reshape(len(made), size * size), axis=1)
        numbers = [masks.setdefault(mask.tobytes(), len(masks)) for mask in packed]
        found[some] = torch.tensor(numbers, dtype=torch.int64)
    bits = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), size * size // 8)
    square = torch.from_numpy(np.unpackbits(bits, axis=1)).view(-1, size, size)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)])
    return Listed(size, offsets, keys.contiguous(), found, square)


def _split(pattern: Pattern, n: int) -> tuple[Pattern | None, list[tuple[int, Pattern]]]:
    """Split a union into a part for tiles, and members whose distances are multiples of ``apart``, with that number."""
    near: list[Pattern] = []
    far: list[tuple[int, Pattern]] = []
    for member in members(pattern):
        # At a distance beyond all tokens, a token sees only itself.
        apart = min(member.apart, n)
        # Classes are faster if tiles would have few pairs each and the mask of a class is small.
        if apart >= APART and _up(n, apart) // apart <= DENSE:
            far.append((apart, member))
        else:
            near.append(member)
    return either(near) if near else None, far


def members(pattern: Pattern) -> list[Pattern]:
    """Split a pattern into a union: ``(a | b) & c - d`` has the members ``a & c - d`` and ``b & c - d``."""
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
    """Return the block size that the pattern consists of, if it is an efficient size, else 0."""
    return max((size for size in pattern.grains if SMALLEST <= size <= 2 * LARGEST and size % 16 == 0), default=0)


def block_size(pattern: Pattern, n: int) -> int:
    """Choose the tokens per block: about half the reach of a short pattern, else the largest size."""
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
    cut = n // size if n % size else n  # the block that ends in padding, which always needs a mask
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
    """Yield groups of rows for one call: with a shared mask, rows whose keys are at equal distances."""
    if not shared:
        yield rows
        return
    _, which = torch.cat([relative, cut[:, None]], 1).unique(dim=0, return_inverse=True)
    for kind in range(int(which.max()) + 1):
        yield rows[which == kind]


def _visible(pattern: Pattern, n: int, size: int, rows: Tensor, keys: Tensor, head: int, layer: int) -> Tensor:
    """Allowed pairs of tokens in query blocks ``rows`` (g,) and key blocks ``keys`` (g,s): bool (g, size, s size)."""
    within = torch.arange(size)
    i = (rows[:, None] * size + within)[:, :, None]
    j = (keys[:, :, None] * size + within).flatten(1)[:, None, :]
    return pattern.allow(i, j, head=head, layer=layer) & (j < n)


def _mask(pattern: Pattern, n: int, size: int, rows: Tensor, keys: Tensor, head: int, layer: int) -> Tensor:
    allowed = _visible(pattern, n, size, rows, keys, head, layer)
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)


def _run(rows: Tensor, keys: Tensor) -> tuple[int, int, int]:
    """``first``, ``begin`` and ``stride`` of ``Tiles``."""
    first = int(rows[0]) if bool((rows.diff() == 1).all()) else -1
    starts, moves = keys[:, 0], keys[:, 0].diff()
    stride = int(moves[0]) if len(moves) else 0
    even = first >= 0 and bool((keys.diff(dim=1) == 1).all()) and bool((moves == stride).all()) and stride >= 0
    return (first, int(starts[0]), stride) if even else (first, -1, 0)


def _classes(pattern: Pattern, apart: int, n: int, head: int, layer: int) -> Classes:
    count = _up(n, apart) // apart
    # If the pattern depends only on the distance and there is no padding, all classes are equal.
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
