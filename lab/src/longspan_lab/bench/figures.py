"""Ratios, growth exponents and crossovers of measurements; pure functions on numbers."""

import math
import re
from collections.abc import Mapping
from itertools import pairwise

# Requirements of a fitted exponent: number of lengths, their ratio, and seconds of the longest call.
LENGTHS, SPREAD, MEASURABLE = 3, 4, 1e-4


def exponent(found: Mapping[int, float]) -> float:
    """The growth exponent: slope of log value by log size, least squares.

    >>> round(exponent({10: 2.0, 20: 8.0, 40: 32.0}), 6)
    2.0
    """
    xs, ys = [math.log(n) for n in found], [math.log(value) for value in found.values()]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def unfitted(found: Mapping[int, float]) -> str:
    """Why a growth exponent of these times in seconds, by length, would be meaningless; "" if it is not.

    >>> unfitted({256: 0.001, 512: 0.002})
    'needs 3 lengths, the longest at least 4 times the shortest'
    """
    if len(found) < LENGTHS or max(found) < SPREAD * min(found):
        return f"needs {LENGTHS} lengths, the longest at least {SPREAD} times the shortest"
    if found[max(found)] < MEASURABLE:
        return f"calls under {1e6 * MEASURABLE:.0f} us measure overhead, not growth"
    return ""


def slope(found: Mapping[int, float]) -> float:
    """The slope of a value by size, least squares.

    >>> slope({2: 5.0, 4: 9.0, 6: 13.0})
    2.0
    """
    mx, my = sum(found) / len(found), sum(found.values()) / len(found)
    return sum((x - mx) * (y - my) for x, y in found.items()) / sum((x - mx) ** 2 for x in found)


def declared(cost: str) -> float:
    """The power of N in a mechanism's declared cost; a logarithm counts as none.

    >>> declared("N D^2"), declared("N^2 D"), declared("N^1.5 D"), declared("N log N D")
    (1.0, 2.0, 1.5, 1.0)
    """
    powers = re.findall(r"(?<!log )\bN(?:\^(\d+(?:\.\d+)?))?", cost)
    return max((float(power or 1) for power in powers), default=0.0)


def ratios(seconds: Mapping[str, float], baseline: str) -> dict[str, float]:
    """The speed-up of each candidate over the baseline.

    >>> ratios({"a": 1.0, "b": 4.0}, "b")
    {'a': 4.0, 'b': 1.0}
    """
    return {name: seconds[baseline] / value for name, value in seconds.items()}


def crossover(one: Mapping[int, float], other: Mapping[int, float]) -> str:
    """The size from which on ``one`` is less than ``other``, by interpolation between common sizes in log-log scale.

    >>> crossover({10: 2.0, 1000: 20.0}, {10: 1.0, 1000: 100.0})
    'from 40'
    >>> crossover({10: 1.0}, {10: 2.0})
    'at every size'
    >>> crossover({10: 2.0, 20: 4.0}, {10: 1.0, 20: 3.0})
    'at no size'
    """
    sizes = sorted(set(one) & set(other))
    gaps = [math.log(one[n] / other[n]) for n in sizes]
    if all(gap < 0 for gap in gaps):
        return "at every size"
    if not gaps or gaps[-1] >= 0:
        return "at no size"
    # The last crossing.
    i = max(i for i, gap in enumerate(gaps) if gap >= 0)
    (m, a), (n, b) = list(pairwise(zip(sizes, gaps, strict=True)))[i]
    return f"from {round(math.exp(math.log(m) + a / (a - b) * math.log(n / m)))}"
