"""Error rates of labels and words, by edit distance."""

from collections.abc import Iterable, Sequence
from typing import Any


def edits(found: Sequence[Any], true: Sequence[Any]) -> int:
    """The edit distance of two sequences: insertions, deletions and substitutions (Levenshtein 1966).

    >>> edits("kitten", "sitting")
    3
    """
    row = list(range(len(true) + 1))
    for i, one in enumerate(found, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(true, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


def rate(pairs: Iterable[tuple[Sequence[Any], Sequence[Any]]]) -> float:
    """The error rate: edits of all pairs (found, true) over the total length of the true sequences; can exceed 1.

    Raises ValueError if the true sequences are empty.
    """
    wrong = length = 0
    for found, true in pairs:
        wrong, length = wrong + edits(found, true), length + len(true)
    if not length:
        raise ValueError("an error rate requires at least one true label")
    return wrong / length
