"""Checks of whole numbers, and arithmetic on bounds that may be None (unbounded)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .._utils.typecheck import format_value

PART = 1 << 20  # differences per step of a search

# Longer than any sequence; products of two such numbers are still exact in int64.
FARTHEST = (1 << 30) - 1


def whole(name: str, value: object, least: int, most: int = FARTHEST) -> None:
    """Raise ValueError unless a value is a whole number from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={format_value(value)} must be a whole number of at least {least}")
    if value > most:
        raise ValueError(f"{name}={format_value(value)} must be at most {most}")


def largest(bounds: Iterable[int | None]) -> int | None:
    bounds = list(bounds)
    return None if None in bounds else max(b for b in bounds if b is not None)


def farthest(reaches: Iterable[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
    """(lookback, lookahead) of a union."""
    # Read each part once: otherwise time would double with every level of nesting.
    bounds = list(reaches)
    return largest(back for back, _ in bounds), largest(ahead for _, ahead in bounds)


def multiple(periods: Iterable[int | None]) -> int | None:
    """The least common multiple; None if a period is unknown."""
    periods = list(periods)
    return None if None in periods else math.lcm(*(p for p in periods if p is not None))


def smallest(bounds: Iterable[int | None]) -> int | None:
    return min((b for b in bounds if b is not None), default=None)


def last(allowed: Callable[[Tensor], Tensor], bound: int | None, sign: int) -> int | None:
    """The largest difference up to a bound that a function of differences allows; 0 if there is none."""
    if bound is None:
        return None
    # From the largest down, in parts, since a bound may be too large for memory.
    for end in range(bound + 1, 0, -PART):
        begin = max(end - PART, 0)
        found = allowed(sign * torch.arange(begin, end)).nonzero()
        if len(found):
            return begin + int(found.max())
    return 0
