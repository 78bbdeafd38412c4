"""Patterns as values: the algebra of ``& | -`` and its canonical form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from . import blocks as tiling
from .blocks import Blocks, Certain, Grid
from .numbers import farthest, last, multiple, smallest, whole


class Pattern:
    """Which keys each query sees: a set of pairs (i, j) of positions, as a frozen value."""

    def allow(self, i: Tensor, j: Tensor, *, head: int = 0, layer: int = 0, n: int | None = None) -> Tensor:
        """Return whether query i sees key j.

        Args:
            i: Query positions, integers >= 0 of any shape.
            j: Key positions; their shape broadcasts with that of ``i``.
            head: The head, for patterns that differ by head.
            layer: The layer, for patterns that differ by layer.
            n: If given, positions outside 0 ... n - 1, such as -1 for padding, see nothing and are not seen.

        Returns:
            A bool tensor of the broadcast shape.

        Raises:
            ValueError: For positions that are not integers, and a negative head or layer.
        """
        if i.dtype not in _INTEGERS or j.dtype not in _INTEGERS:
            raise ValueError(f"positions are {i.dtype} and {j.dtype}; they must be integers, such as torch.int64")
        whole("head", head, 0)
        whole("layer", layer, 0)
        seen = self.see(i, j, head, layer)
        if n is not None:
            seen = seen & (i >= 0) & (i < n) & (j >= 0) & (j < n)
        return seen.expand(torch.broadcast_shapes(i.shape, j.shape))

    def dense(
        self, n: int, m: int | None = None, *, heads: int = 1, layer: int = 0, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the mask of all pairs, for tests and short sequences.

        Args:
            n: Number of queries, the last n of m positions.
            m: Number of keys; None: n.
            heads: Number of heads.
            layer: The layer, for patterns that differ by layer.
            device: Device of the result.

        Returns:
            A bool tensor (heads, n, m), or (1, n, m) if all heads are equal.

        Raises:
            ValueError: For n < 1, m < n and heads < 1.
        """
        whole("n", n, 1)
        m = n if m is None else m
        whole("m", m, n)
        whole("heads", heads, 1)
        keys = torch.arange(m, device=device)
        queries = keys[m - n :, None]
        count = heads if self.per_head else 1
        return torch.stack([self.allow(queries, keys, head=head, layer=layer) for head in range(count)])

    def blocks(self, n: int, size: int, *, start: int = 0, head: int = 0, layer: int = 0) -> Blocks:
        """List the blocks of keys that each block of queries needs, without a matrix of all pairs.

        Queries are at positions start ... start + n - 1 and keys at 0 ... start + n - 1. Blocks are counted from
        position 0, so row 0 is query block ``start // size``, whose queries before ``start`` are ignored.

        Every allowed pair is in a listed block, and ``full`` marks only blocks in which all pairs are allowed. If parts
        of different kinds meet in too many tiles, some listed blocks may be empty and some full blocks unmarked: see
        ``patterns.blocks``. Time and memory grow with n and the number of candidate tiles, at most (n / size)^2.

        Args:
            n: Number of queries.
            size: Positions per block.
            start: Position of the first query.
            head: The head, for patterns that differ by head.
            layer: The layer, for patterns that differ by layer.

        Raises:
            ValueError: For n < 1, size < 1 and start < 0.
        """
        for name, value, least in (("n", n, 1), ("size", size, 1), ("start", start, 0)):
            whole(name, value, least)
        whole("head", head, 0)
        whole("layer", layer, 0)
        return tiling.build(self.at(head, layer), n, size, start, head, layer)

    @property
    def lookback(self) -> int | None:
        """Upper bound of i - j, at least 0: the tokens that a decoder must remember. None: unbounded."""
        return self.reach[0]

    @property
    def lookahead(self) -> int | None:
        """Upper bound of j - i, at least 0; 0 for causal patterns. None: unbounded."""
        return self.reach[1]

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return False

    def __and__(self, other: Pattern) -> Pattern:
        if not isinstance(other, Pattern):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
            return NotImplemented
        return both((self, other), ())

    def __or__(self, other: Pattern) -> Pattern:
        if not isinstance(other, Pattern):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
            return NotImplemented
        return either((self, other))

    def __sub__(self, other: Pattern) -> Pattern:
        if not isinstance(other, Pattern):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
            return NotImplemented
        return both((self,), (other,))

    # A new atom defines ``see`` and ``reach``. It also defines ``kind`` ("diagonal" for a function of i - j, "column"
    # for one of j), or ``unit`` and ``spans``, or ``near`` and ``tiles``. ``period``, ``apart`` and ``grains`` are
    # optional and used to plan the work.

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        """``allow`` without its checks; the result only needs to broadcast to the joint shape."""
        # Abstract: every atom defines it.
        raise NotImplementedError(f"{type(self).__name__} defines no see")

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(lookback, lookahead)."""
        # Abstract: every atom defines it.
        raise NotImplementedError(f"{type(self).__name__} defines no reach")

    @property
    def kind(self) -> str:
        return ""

    @property
    def period(self) -> int | None:
        """A shift of all positions that does not change the pattern; None if none is known."""
        return 1 if self.kind == "diagonal" else None

    @property
    def apart(self) -> int:
        """A number that divides i - j for all pairs; 1 if none is known."""
        return 1

    @property
    def grains(self) -> frozenset[int]:
        """The sizes of the blocks that the pattern consists of, if any."""
        return frozenset()

    def near(self, grid: Grid) -> Tensor | None:
        """Candidate key blocks (nb, s) of each query block, a superset in any order; None: all."""
        return tiling.near(self, grid)

    def tiles(self, grid: Grid, blocks: Tensor) -> Certain:
        """Return what is known about the tiles with these key blocks, (nb|1, s)."""
        return tiling.tiles(self, grid, blocks)

    def at(self, head: int, layer: int) -> Pattern:
        """The pattern of one head of one layer, without ``by_head`` and ``by_layer``."""
        return self


_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class everywhere(Pattern):
    """Every query sees every key."""

    @property
    def kind(self) -> str:
        return "diagonal"

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, None

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return (i == i) & (j == j)


@dataclass(frozen=True)
class nowhere(Pattern):
    """No query sees any key; ``a - a`` gives this pattern."""

    @property
    def kind(self) -> str:
        return "diagonal"

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return 0, 0

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return (i != i) & (j != j)


def _common(parts: Iterable[Pattern]) -> str:
    """The kind of an expression: that of its parts, if they agree and are functions of one number."""
    kinds = {part.kind for part in parts}
    return kinds.pop() if len(kinds) == 1 and kinds <= {"diagonal", "column"} else ""


@dataclass(frozen=True, repr=False)
class Either(Pattern):
    """The union of two or more patterns; made by ``|``."""

    parts: tuple[Pattern, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    @property
    def kind(self) -> str:
        return _common(self.parts)

    @property
    def per_head(self) -> bool:
        return any(part.per_head for part in self.parts)

    @property
    def period(self) -> int | None:
        return multiple(part.period for part in self.parts)

    @property
    def grains(self) -> frozenset[int]:
        return frozenset().union(*(part.grains for part in self.parts))

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return farthest(part.reach for part in self.parts)

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        seen = self.parts[0].see(i, j, head, layer)
        for part in self.parts[1:]:
            seen = seen | part.see(i, j, head, layer)
        return seen

    def _groups(self) -> list[Pattern]:
        """The parts, with those of one exact kind combined."""
        grouped = {k: tuple(p for p in self.parts if p.kind == k) for k in ("diagonal", "column")}
        return [Either(g) for g in grouped.values() if g] + [p for p in self.parts if p.kind not in grouped]

    def near(self, grid: Grid) -> Tensor | None:
        if self.kind:
            return super().near(grid)
        tables = [table for part in self._groups() if (table := part.near(grid)) is not None]
        return torch.cat(tables, 1) if len(tables) == len(self._groups()) else None

    def tiles(self, grid: Grid, blocks: Tensor) -> Certain:
        if self.kind:
            return super().tiles(grid, blocks)
        return tiling.fold([part.tiles(grid, blocks) for part in self._groups()], Certain.either)

    def at(self, head: int, layer: int) -> Pattern:
        return either(part.at(head, layer) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Both(Pattern):
    """The pairs in all ``parts`` and in none of ``removed``, made by ``&`` and ``-``; without parts a complement."""

    parts: tuple[Pattern, ...]
    removed: tuple[Pattern, ...]

    def __repr__(self) -> str:
        wanted = [f"({p!r})" if isinstance(p, Either) else repr(p) for p in self.parts or (everywhere(),)]
        unwanted = [f"({p!r})" if isinstance(p, Both) else repr(p) for p in self.removed]
        return " - ".join([" & ".join(wanted), *unwanted])

    @property
    def kind(self) -> str:
        return _common((*self.parts, *self.removed))

    @property
    def per_head(self) -> bool:
        return any(part.per_head for part in (*self.parts, *self.removed))

    @property
    def period(self) -> int | None:
        return multiple(part.period for part in (*self.parts, *self.removed))

    @property
    def apart(self) -> int:
        return math.lcm(*(part.apart for part in self.parts))

    @property
    def grains(self) -> frozenset[int]:
        return frozenset().union(*(part.grains for part in self.parts))

    @property
    def reach(self) -> tuple[int | None, int | None]:
        # Read each part once: otherwise time would double with every level of nesting.
        bounds = [part.reach for part in self.parts]
        back, ahead = smallest(b for b, _ in bounds), smallest(a for _, a in bounds)
        if self.kind != "diagonal":
            return back, ahead

        def allowed(difference: Tensor) -> Tensor:
            return self.see(difference, torch.zeros((), dtype=torch.int64), 0, 0)

        return last(allowed, back, 1), last(allowed, ahead, -1)

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        seen = [part.see(i, j, head, layer) for part in self.parts]
        seen += [~part.see(i, j, head, layer) for part in self.removed]
        result = seen[0]
        for other in seen[1:]:
            result = result & other
        return result

    def _groups(self) -> tuple[list[Pattern], list[Pattern]]:
        """Wanted and unwanted parts, with those of one exact kind combined."""
        wanted, unwanted = list(self.parts), list(self.removed)
        for kind in ("diagonal", "column"):
            group = Both(*(tuple(p for p in parts if p.kind == kind) for parts in (wanted, unwanted)))
            if group.parts:
                wanted = [group, *(p for p in wanted if p.kind != kind)]
                unwanted = [p for p in unwanted if p.kind != kind]
        return wanted, unwanted

    def near(self, grid: Grid) -> Tensor | None:
        if self.kind:
            return super().near(grid)
        grid = grid.narrow(*self.reach)
        tables = [part.near(grid) for part in self._groups()[0]]
        return min((t for t in tables if t is not None), key=lambda t: t.shape[1], default=None)

    def tiles(self, grid: Grid, blocks: Tensor) -> Certain:
        if self.kind:
            return super().tiles(grid, blocks)
        wanted, unwanted = self._groups()
        known = [part.tiles(grid, blocks) for part in wanted] + [~part.tiles(grid, blocks) for part in unwanted]
        return tiling.fold(known, Certain.both)

    def at(self, head: int, layer: int) -> Pattern:
        return both((p.at(head, layer) for p in self.parts), (p.at(head, layer) for p in self.removed))


@lru_cache(maxsize=1 << 14)  # nested patterns repeat the same comparisons
def _within(a: Pattern, b: Pattern) -> bool:
    """Whether the expressions alone prove that every pair of a is in b."""
    if a == b or isinstance(a, nowhere) or isinstance(b, everywhere):
        return True
    if isinstance(a, Either):
        return all(_within(part, b) for part in a.parts)
    if isinstance(b, Either) and any(_within(a, part) for part in b.parts):
        return True
    if isinstance(b, Both) and all(_within(a, p) for p in b.parts) and all(_apart(a, r) for r in b.removed):
        return True
    return isinstance(a, Both) and any(_within(part, b) for part in a.parts)


@lru_cache(maxsize=1 << 14)
def _apart(a: Pattern, b: Pattern) -> bool:
    """Whether the expressions alone prove that no pair is in both."""
    for one, other in ((a, b), (b, a)):
        if isinstance(one, nowhere):
            return True
        if isinstance(one, Either) and all(_apart(part, other) for part in one.parts):
            return True
        if isinstance(one, Both) and (
            any(_within(other, r) for r in one.removed) or any(_apart(part, other) for part in one.parts)
        ):
            return True
    return False


def either(parts: Iterable[Pattern]) -> Pattern:
    """The union in canonical form."""
    flat = {q for part in parts for q in (part.parts if isinstance(part, Either) else (part,))}
    complements: set[Both] = {p for p in flat if isinstance(p, Both) and not p.parts}
    if complements and len(flat) > 1:
        # The union with a complement is the complement of the pairs that are missing from both.
        missing = both((either(p.removed) for p in complements), flat - complements)
        return both((), (missing,))
    kept = sorted(flat, key=repr)
    # Compounds first: if two parts make each other redundant, the simpler one stays.
    for part in sorted(kept, key=lambda p: not isinstance(p, Both)):
        others = Either(tuple(p for p in kept if p is not part))
        if _within(part, others):
            kept.remove(part)
    return kept[0] if len(kept) == 1 else Either(tuple(kept)) if kept else nowhere()


def both(parts: Iterable[Pattern], removed: Iterable[Pattern]) -> Pattern:
    """The intersection of parts, without what is removed, in canonical form."""
    wanted, unwanted = set(), set()
    queue = [(p, True) for p in parts] + [(r, False) for r in removed]
    while queue:
        part, positive = queue.pop()
        if isinstance(part, Both) and positive:
            queue += [(p, True) for p in part.parts] + [(r, False) for r in part.removed]
        elif isinstance(part, Both) and not part.parts:
            queue.append((either(part.removed), True))
        elif isinstance(part, Either) and not positive:
            queue += [(p, False) for p in part.parts]
        else:
            (wanted if positive else unwanted).add(part)
    kept, dropped = sorted(wanted - {everywhere()}, key=repr), sorted(unwanted, key=repr)
    rest = Both(tuple(kept), tuple(dropped))
    if any(_within(rest, r) for r in dropped) or any(_apart(rest, p) for p in kept):
        return nowhere()
    for part in sorted(kept, key=lambda p: not isinstance(p, Either)):
        others = [p for p in kept if p is not part]
        if _within(Both(tuple(others), tuple(dropped)), part):
            kept = others
    for part in tuple(dropped):
        others = [r for r in dropped if r is not part]
        if _apart(Both(tuple(kept), tuple(others)), part):
            dropped = others
    if kept[1:] or dropped:
        return Both(tuple(kept), tuple(dropped))
    return kept[0] if kept else everywhere()
