"""Error rates: how many labels or words must be put in, taken out or exchanged."""

from collections.abc import Iterable, Sequence
from typing import Any


def edits(found: Sequence[Any], true: Sequence[Any]) -> int:
    """The least number of insertions, deletions and substitutions that make ``true`` of ``found`` (Levenshtein 1966).

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
    """Edits of all (found, true) over the length of all that is true; above 1 where much is found that is not there.

    Raises ValueError where nothing is true.
    """
    wrong = length = 0
    for found, true in pairs:
        wrong, length = wrong + edits(found, true), length + len(true)
    if not length:
        raise ValueError("an error rate needs something that is true; no label came")
    return wrong / length
