"""A pattern for each head, or for each layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .algebra import Pattern
from .numbers import farthest


@dataclass(frozen=True, init=False, repr=False)
class _Choice(Pattern):
    patterns: tuple[Pattern, ...]

    def __init__(self, *patterns: Pattern) -> None:
        name = type(self).__name__
        for pattern in patterns:
            if not isinstance(pattern, Pattern):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
                raise ValueError(f"{name} takes patterns, not {pattern!r}")
        if not patterns:
            raise ValueError(f"{name}() has no pattern; pass at least one")
        object.__setattr__(self, "patterns", patterns)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.patterns))})"

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return farthest(pattern.reach for pattern in self.patterns)

    def choose(self, head: int, layer: int) -> Pattern:
        """Return the pattern of a head of a layer."""
        # Abstract: by_head and by_layer define it.
        raise NotImplementedError(f"{type(self).__name__} defines no choose")

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return self.choose(head, layer).see(i, j, head, layer)

    def at(self, head: int, layer: int) -> Pattern:
        return self.choose(head, layer).at(head, layer)


@dataclass(frozen=True, init=False, repr=False)
class by_head(_Choice):
    """Head h has the pattern h % count: ``by_head(band(63), strided(64))``."""

    @property
    def per_head(self) -> bool:
        return any(p != self.patterns[0] or p.per_head for p in self.patterns)

    def choose(self, head: int, layer: int) -> Pattern:
        return self.patterns[head % len(self.patterns)]


@dataclass(frozen=True, init=False, repr=False)
class by_layer(_Choice):
    """Layer l has the pattern l % count: ``by_layer(band(63), strided(64))``."""

    @property
    def per_head(self) -> bool:
        return any(p.per_head for p in self.patterns)

    def choose(self, head: int, layer: int) -> Pattern:
        return self.patterns[layer % len(self.patterns)]
