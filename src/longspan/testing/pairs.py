"""Rows of options that cover all pairs of values, instead of their product."""

import itertools
from collections.abc import Sequence
from typing import Any


def all_pairs(**domains: Sequence[Any]) -> list[dict[str, Any]]:
    """Return rows, one value of each domain per row, in which any two values of two domains meet."""
    sizes = {name: range(len(values)) for name, values in domains.items()}
    left = {
        ((one, i), (other, j))
        for one, other in itertools.combinations(sizes, 2)
        for i, j in itertools.product(sizes[one], sizes[other])
    }
    if len(sizes) < 2:
        return [{name: value} for name, values in domains.items() for value in values]
    rows = []
    while left:
        row = dict(min(left))
        for name in sizes:
            if name not in row:
                row[name] = max(sizes[name], key=lambda i, name=name: (_new(row, name, i, left), -i))
        left -= {pair for pair in left if all(row[name] == i for name, i in pair)}
        rows.append({name: domains[name][row[name]] for name in sizes})
    return rows


def _new(row: dict[str, int], name: str, i: int, left: set) -> int:
    """How many pairs that are still to be covered the value adds to the row."""
    return sum(((name, i), item) in left or (item, (name, i)) in left for item in row.items())
