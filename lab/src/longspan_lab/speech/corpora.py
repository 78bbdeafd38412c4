"""Speech corpora by name: ``tones``, ``fsdd``, ``fsdd:PATH``, ``an4:FOLDER``."""

from longspan._utils.spec import known
from longspan.speech.labels import UNITS

from . import an4, fsdd, tones
from .corpus import Corpus

NAMES = ("an4", "fsdd", "tones")


def check(name: str, units: str) -> None:
    """Raise ValueError for a name or units that ``load`` does not know; files are not checked."""
    known(units, dict.fromkeys(UNITS), "unit of labels")
    kind, colon, source = name.partition(":")
    known(kind, dict.fromkeys(NAMES), "corpus of speech")
    if colon and not source:
        raise ValueError(f"nothing follows the colon of {name!r}; pass e.g. {kind}:FOLDER")
    if kind == "tones" and source:
        raise ValueError(f"{name}: tones are synthetic and have no folder; pass tones")
    if kind == "an4" and not source:
        raise ValueError("an4 cannot be downloaded; if you have its files, pass an4:FOLDER")


def load(name: str, *, units: str, speaker: str = "", longest: int = 10, seed: int = 0) -> Corpus:
    """Load a corpus of speech.

    Args:
        name: ``fsdd`` (downloaded once), ``fsdd:PATH``, ``an4:FOLDER``, or ``tones`` (synthetic).
        units: the labels: letters, phonemes or words.
        speaker: the speaker held out of FSDD; "": the last by name.
        longest: largest number of digits in a string, for FSDD and tones.
        seed: seed of strings and tones.

    Raises:
        ValueError: for an unknown name or speaker, and for missing or invalid files.
        ImportError: if an optional package is missing.
    """
    check(name, units)
    kind, _, source = name.partition(":")
    if speaker and kind != "fsdd":
        raise ValueError(f"speaker={speaker}: {kind} has fixed test speakers; only fsdd accepts speaker=")
    if kind == "an4":
        return an4.load(source, units)
    if kind == "tones":
        return tones.load(units, longest, seed)
    return fsdd.load(source, units, speaker, longest, seed)
