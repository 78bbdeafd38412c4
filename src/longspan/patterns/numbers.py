"""Whole numbers that patterns are made of, and bounds of which some are not there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .._utils.typecheck import format_value

PART = 1 << 20  # differences that are tried at once

# No sequence is as long, and products of two such numbers are still exact.
FARTHEST = (1 << 30) - 1


def whole(name: str, value: object, least: int, most: int = FARTHEST) -> None:
    """Raise ValueError unless a value is a whole number of at least ``least`` and at most ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={format_value(value)} must be a whole number of at least {least}")
    if value > most:
        raise ValueError(f"{name}={format_value(value)} must be at most {most}")


def largest(bounds: Iterable[int | None]) -> int | None:
    bounds = list(bounds)
    return None if None in bounds else max(b for b in bounds if b is not None)


def farthest(reaches: Iterable[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
    """(lookback, lookahead) of a union."""
    # Each part is asked once, or time would double with every level of nesting.
    bounds = list(reaches)
    return largest(back for back, _ in bounds), largest(ahead for _, ahead in bounds)


def multiple(periods: Iterable[int | None]) -> int | None:
    """The least common one; None where one is not known."""
    periods = list(periods)
    return None if None in periods else math.lcm(*(p for p in periods if p is not None))


def smallest(bounds: Iterable[int | None]) -> int | None:
    return min((b for b in bounds if b is not None), default=None)


def last(allowed: Callable[[Tensor], Tensor], bound: int | None, sign: int) -> int | None:
    """The largest difference up to a bound that a function of differences allows; 0 where there is none."""
    if bound is None:
        return None
    # From the largest down, a part at a time: a bound may be far beyond what fits into memory.
    for end in range(bound + 1, 0, -PART):
        begin = max(end - PART, 0)
        found = allowed(sign * torch.arange(begin, end)).nonzero()
        if len(found):
            return begin + int(found.max())
    return 0
