"""Data sets by name, each with fixed held-out splits.

| name | tokens | training / validation / test |
|---|---|---|
| ``digits`` | 8x8 images, 17 grey levels, inside scikit-learn | of each class's images in the file's order, the ninth of every ten to validation, the tenth to test |
| ``mnist``, ``mnist:FOLDER`` | 28x28 images, 256 grey levels | the last 5000 training images to validation; the official test set |
| ``cifar10``, ``cifar10:FOLDER`` | 32x32x3 images, 256 levels, red, green, blue of each pixel in turn | the last tenth of the training images (5000 of the whole set) to validation; the official test set |
| ``text:stdlib`` | bytes of the running Python's standard library | the first 90 %, the next 5 %, the last 5 % |
| ``text:PATH`` | bytes of a file (plain, .gz, .xz), or of a folder of such .txt files; nothing is decoded | the same |
| ``pairs:dates``, ``pairs:reverse`` | bytes of generated pairs of a source and a target, and the stop token | by the sha256 of the source, one of 20 values to validation, one to the test |
| ``pairs:FILE`` | bytes of two columns with a tab between them, or of .jsonl whole numbers; plain, .gz, .xz | the same |
| ``labels:majority`` | bytes of generated texts, each with a label | by the sha256 of the text, one of 20 values to validation, one to the test |
| ``labels:FILE``, ``labels:FOLDER`` | UTF-8 bytes of the texts of a .jsonl, .tsv or .csv file with ``text`` and ``label``, or of a folder's files train, test and, where there is one, validation; plain, .gz, .xz | the same, for what has no file |
| ``tokens:FOLDER`` | tokens that ``longspan tokenize`` wrote, memory-mapped | the last 5 % to the test, as many before to validation, at most 2^24 tokens each |
"""  # noqa: E501 - a table's rows cannot be broken

from pathlib import Path
from typing import Any

from .._utils.cache_dirs import cache_folder, expanded
from .._utils.spec import known
from . import images, labeled, pairs, text, tokens
from .dataset import Dataset
from .download import fetch
from .labeled import Labeled
from .order import batch_indices
from .pairs import Pairs
from .tokens import Tokens

__all__ = [
    "Dataset",
    "Labeled",
    "Pairs",
    "Tokens",
    "absolute",
    "batch_indices",
    "cache_folder",
    "fetch",
    "load",
    "unit",
]

_IMAGES = {"digits": images.digits, "mnist": images.mnist, "cifar10": images.cifar10}
_UNITS = {"text": "byte", "pairs": "token", "labels": "label", "tokens": "token", "tuning": "token"}
_READERS = {"text": text.load, "pairs": pairs.load, "labels": labeled.load, "tokens": tokens.load}
# Names of data without a file.
_OWN = {f"text:{text.STDLIB}", *(f"pairs:{task}" for task in pairs.TASKS)}
_OWN |= {f"labels:{task}" for task in labeled.LABELED}


def load(name: str, length: int = 0, *, short: bool = False) -> Any:
    """Load a data set.

    Without a folder, ``mnist`` and ``cifar10`` are downloaded once, checked by sha256, and kept in the cache folder
    (see ``cache_folder``). The result does not depend on a random number generator.

    Args:
        name: a name in the table above.
        length: tokens per example. Text and tokens: window size (0: 256). Pairs: largest number of tokens in a source
            or a target (0: 256). Labeled texts: bytes read of each (0: 1024). Images: 0.
        short: accept texts, tokens, pairs and labeled texts that are too short for held-out parts. Each split then has
            all of them, a text in equal windows of up to ``length``.

    Returns:
        A ``Dataset`` (images, text), ``Tokens``, ``Pairs``, or ``Labeled`` texts.

    Raises:
        ValueError: for an unknown name, a missing, truncated or invalid file, a failed download, a length that images
            do not have, invalid lines, and, without ``short``, a text whose held-out parts are shorter than one window.
        ImportError: if an optional package is missing.
    """
    kind, colon, source = name.partition(":")
    if not colon and name not in _IMAGES and Path(name).exists():
        raise ValueError(f"{name!r} is a path, not the name of a data set; for a text pass text:{name}")
    kind = known(kind, {**_IMAGES, **_READERS}, "data set")
    if colon and not source:
        raise ValueError(f"nothing follows the colon of {name!r}; pass e.g. {kind}:FOLDER")
    if length < 0:
        raise ValueError(f"length={length}: must be >= 0; 0 means the data set's own")
    if kind in _READERS:
        return _READERS[kind](source, length, short)
    data = _IMAGES[kind](source)
    if length not in (0, data.length):
        raise ValueError(f"length={length}: {kind} has {data.length} tokens per image; leave length at 0")
    return data


def absolute(name: str) -> str:
    """Make the path in a name absolute: ``text:a.txt`` becomes ``text:/home/me/a.txt``.

    >>> absolute("text:stdlib"), absolute("text:/books/a.txt")
    ('text:stdlib', 'text:/books/a.txt')
    """
    kind, _, source = name.partition(":")
    return name if not source or name in _OWN else f"{kind}:{expanded(source).absolute()}"


def unit(name: str) -> str:
    """The unit in "bits per ..." of a data set: dim, byte, token or label."""
    return _UNITS.get(name.partition(":")[0], "dim")
