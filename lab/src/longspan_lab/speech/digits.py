"""The ten digits as words and phonemes."""

from collections.abc import Sequence

from longspan.speech.labels import LETTERS, encode

SPOKEN = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# As the CMU pronouncing dictionary has them, the first of each.
PHONEMES = (
    "Z IH R OW",
    "W AH N",
    "T UW",
    "TH R IY",
    "F AO R",
    "F AY V",
    "S IH K S",
    "S EH V AH N",
    "EY T",
    "N AY N",
)
_LABELS = {
    "letters": LETTERS,
    "phonemes": " ".join(["|", *sorted({one for word in PHONEMES for one in word.split()})]),
    "words": " ".join(SPOKEN),
}


def labels_of(units: str) -> str:
    """The labels of digits in letters, phonemes or words, ``labels.UNITS``."""
    return _LABELS[units]


def target(digits: Sequence[int], units: str) -> list[int]:
    """Digits as classes.

    >>> target([1, 1], "words")
    [2, 2]
    """
    spelt = {"letters": SPOKEN, "phonemes": [word.split() for word in PHONEMES], "words": [[word] for word in SPOKEN]}
    return encode([spelt[units][digit] for digit in digits], labels_of(units))
