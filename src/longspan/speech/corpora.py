"""Corpora by name: ``tones``, ``fsdd``, ``fsdd:PATH``, ``an4:FOLDER``."""

from .._utils.spec import known
from . import an4, fsdd, tones
from .corpus import Corpus
from .labels import UNITS

NAMES = ("an4", "fsdd", "tones")


def check(name: str, units: str) -> None:
    """Raise ValueError unless ``load`` knows name and units; whether its files are there is not asked."""
    known(units, dict.fromkeys(UNITS), "unit of labels")
    kind, colon, source = name.partition(":")
    known(kind, dict.fromkeys(NAMES), "corpus of speech")
    if colon and not source:
        raise ValueError(f"nothing follows the colon of {name!r}; write e.g. {kind}:FOLDER")
    if kind == "tones" and source:
        raise ValueError(f"{name}: tones are made by the seed and have no folder")
    if kind == "an4" and not source:
        raise ValueError("an4 has no address of its own any more; where its files are at hand, write an4:FOLDER")


def load(name: str, *, units: str, speaker: str = "", longest: int = 10, seed: int = 0) -> Corpus:
    """A corpus: ``fsdd`` is downloaded once, ``fsdd:PATH`` and ``an4:FOLDER`` are read, ``tones`` are made.

    ``units``: letters, phonemes or words as labels. ``speaker``: who is held out of FSDD ("": the last by name).
    ``longest``: digits of a string, for FSDD and tones.

    Raises ValueError for an unknown name, a speaker where there is none to choose, and files that are missing or wrong;
    ImportError where an optional package is missing.
    """
    check(name, units)
    kind, _, source = name.partition(":")
    if speaker and kind != "fsdd":
        raise ValueError(f"speaker={speaker}: {kind} has test speakers of its own; only of fsdd one is chosen")
    if kind == "an4":
        return an4.load(source, units)
    if kind == "tones":
        return tones.load(units, longest, seed)
    return fsdd.load(source, units, speaker, longest, seed)
