"""Text classification: whether a review of a film, read as bytes, is a good one.

Source: Maas et al. 2011, "Learning Word Vectors for Sentiment Analysis"; bytes as in Tay et al. 2020 (2011.04006),
section 2.2.2.
"""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

from longspan._utils import atomic_io
from longspan._utils.cache_dirs import cache_folder, expanded
from longspan.data.download import ARCHIVE_ERRORS, describe, fetch, members, read

from .sequences import Arena, arena, balanced, rows

URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
SHA256 = "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"
ARCHIVE = URL.rpartition("/")[2]
LABELS = {"neg": 0, "pos": 1}
HELD = 20  # one in 20 training reviews of each class is for validation
ENDS = (".jsonl", ".jsonl.gz", ".jsonl.xz")

Review = tuple[tuple[bytes], int]


def load(source: str, length: int, examples: int, tests: int, seed: int) -> Arena:
    """The first ``length`` bytes of reviews, in the official training and test sets.

    ``imdb`` is downloaded once, checked by sha256 and kept in the cache folder. ``imdb:FOLDER`` has the archive
    aclImdb_v1.tar.gz, or what is packed in it (train/pos/*.txt ...), or files train*.jsonl and test*.jsonl (plain, .gz
    or .xz; the names may begin with imdb_) of objects with ``text`` and ``label``, 1 for good and 0 for bad. Of each
    class of the training set the last one of every 20 is for validation. ``seed`` plays no part.

    Raises ValueError for another source, missing or foreign files, and a download that fails; ImportError without pooch
    where there is something to download.
    """
    kind, colon, name = source.partition(":")
    if kind != "imdb" or (colon and not name):
        raise ValueError(f"text={source}: expected imdb (downloaded) or imdb:FOLDER")
    if colon:
        parts = {part: list(_folder(expanded(name), part)) for part in ("train", "test")}
    else:
        parts = _archive(fetch([URL], SHA256, cache_folder() / "imdb"))
    for part, found in parts.items():
        if {label for _, label in found} != {0, 1}:
            raise ValueError(f"text={source}: the {part} set has {len(found)} reviews, which are not of both classes")
    train, held = _divided(parts["train"])
    splits = {
        "train": rows(_first(train, examples), length),
        "validation": rows(_first(held, tests), length),
        "test": rows(_first(parts["test"], tests), length),
    }
    return arena(f"text, {source}", 256, length, 2, splits)


def _divided(reviews: list[Review]) -> tuple[list[Review], list[Review]]:
    """Reviews for training and those for validation."""
    turns = {0: 0, 1: 0}
    parts: tuple[list[Review], list[Review]] = ([], [])
    for review in reviews:
        turns[review[1]] += 1
        parts[turns[review[1]] % HELD == 0].append(review)
    return parts


def _first(reviews: list[Review], most: int) -> list[Review]:
    chosen = balanced(torch.tensor([label for _, label in reviews], dtype=torch.int64), most)
    return [reviews[i] for i in chosen.tolist()]


def _folder(folder: Path, part: str) -> Iterator[Review]:
    """The reviews of one part, whichever way the folder has them."""
    if not folder.is_dir():
        raise ValueError(f"no reviews at {folder.absolute()}: there is no such folder")
    root = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    if (root / part).is_dir():
        for name, label in LABELS.items():
            for path in sorted((root / part / name).glob("*.txt")):
                yield (read(path),), label
    elif listed := [p for p in sorted(folder.iterdir()) if _is_lines(p.name, part)]:
        for path in listed:
            yield from _lines(path)
    elif (folder / ARCHIVE).is_file():
        yield from _archive(folder / ARCHIVE)[part]
    else:
        raise ValueError(f"no reviews in {folder}: looked for {part}/pos/*.txt, {part}*.jsonl and {ARCHIVE}")


def _is_lines(name: str, part: str) -> bool:
    return name.removeprefix("imdb_").startswith(part) and name.endswith(ENDS)


def _lines(path: Path) -> Iterator[Review]:
    for number, line in enumerate(atomic_io.without_mark(read(path)).splitlines(), 1):
        try:
            found = json.loads(line)
            text, label = found["text"], found["label"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'line {number} of {path} must be {{"text": ..., "label": ...}}') from error
        if not isinstance(text, str) or label not in (0, 1):
            raise ValueError(f"line {number} of {path}: a text is a string and a label 0 or 1, not {label!r}")
        yield (text.encode("utf-8", "surrogateescape"),), int(label)


def _archive(path: Path) -> dict[str, list[Review]]:
    """Both parts, in the order of the reviews' names."""
    found: dict[str, dict[str, Review]] = {"train": {}, "test": {}}
    try:
        for name, content in members(path, lambda name: _is_review(PurePosixPath(name).parts[-3:])):
            where = PurePosixPath(name).parts[-3:]
            found[where[0]]["/".join(where)] = ((content,), LABELS[where[1]])
    except ARCHIVE_ERRORS as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}){describe(path, SHA256)}") from error
    return {part: [reviews[name] for name in sorted(reviews)] for part, reviews in found.items()}


def _is_review(where: tuple[str, ...]) -> bool:
    return len(where) == 3 and where[0] in ("train", "test") and where[1] in LABELS
