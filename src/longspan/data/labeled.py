"""Labeled texts from a file or a generated task, in fixed splits."""

import csv
import hashlib
import io
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._utils import atomic_io
from .._utils.cache_dirs import expanded
from .._utils.spec import known
from .._utils.typecheck import format_value
from . import text
from .dataset import check_indices, sha256
from .generated import LABELED
from .pairs import Column, column

MOST = 1024  # default number of bytes read of a text
PARTS = 20  # of which one is for validation and one for the test
SPLITS = ("train", "validation", "test")
DIALECTS = {".tsv": "excel-tab", ".csv": "excel"}
PACKED = (".gz", ".xz")
Row = tuple[str, str]


class Batch(NamedTuple):
    """Some texts, padded on the right to the longest of them, and their classes."""

    tokens: Tensor  # (B,N) int64, bytes
    mask: Tensor  # (B,N) bool, True on real tokens
    labels: Tensor  # (B,) int64


@dataclass(frozen=True, eq=False)
class Labeled:
    """Texts as UTF-8 bytes with labels, in the splits train, validation and test."""

    name: str
    """the name given to ``load``"""
    labels: tuple[str, ...]
    """the names of the classes, sorted; class i is the i-th of them"""
    length: int
    """bytes of the longest text, at most the ``length`` given to ``load``"""
    checksum: str
    """sha256 (hex) of the unpacked files in turn, or of the generated rows; equal ones mean equal data"""
    splits: Mapping[str, tuple[Column, Tensor]] = field(repr=False)
    """per split: the texts, and their classes (count,) int64"""

    vocab = 256
    unit = "label"
    grid = ()

    def count(self, split: str) -> int:
        """Texts in ``split``. Raises ValueError for a split that does not exist."""
        return len(self._part(split)[1])

    def mean(self, split: str) -> float:
        """Mean number of bytes of the texts in ``split``."""
        return int(self._part(split)[0].ends[-1]) / max(1, self.count(split))

    def take(self, split: str, indices: Tensor) -> Batch:
        """The texts numbered ``indices (B,) int64`` of ``split``.

        Raises ValueError for a split that does not exist and for indices that are not int64 (B,) in 0 ... count-1.
        """
        texts, labels = self._part(split)
        check_indices(indices, len(labels), split)
        return Batch(*texts.padded(indices), labels[indices])

    def renumbered(self, labels: Iterable[str]) -> "Labeled":
        """The same texts with classes numbered as in ``labels``, those of a model.

        Raises ValueError for a label of the data that is not in ``labels``.
        """
        names = tuple(labels)
        if wrong := [name for name in self.labels if name not in names]:
            raise ValueError(
                f"{self.name} has the label {wrong[0]!r}, but the labels of the model are {', '.join(names)}"
            )
        places = torch.tensor([names.index(name) for name in self.labels])
        splits = {split: (texts, places[classes]) for split, (texts, classes) in self.splits.items()}
        return replace(self, labels=names, splits=splits)

    def _part(self, split: str) -> tuple[Column, Tensor]:
        return self.splits[known(split, self.splits, "split")]


def load(source: str, length: int, short: bool = False) -> Labeled:
    """Load labeled texts.

    A .jsonl file has one object per line with ``text`` and ``label``. A .tsv or .csv file has a header with the columns
    ``text`` and ``label``, and quotes as in Python's csv module. Other entries and columns are ignored. Each file may
    be packed as .gz or .xz. A label is a word or an integer.

    A folder has a file for train, one for test and optionally one for validation, such as train.jsonl.xz. A split
    without a file gets one in 20 texts of the training file, chosen by the sha256 of the text. So equal texts are in
    the same split, and added rows do not move others.

    Args:
        source: "majority" (generated), a file, or a folder with a file per split.
        length: bytes read of each text; 0: 1024.
        short: as in ``data.load``.

    Raises:
        ValueError: without a source, for a missing or unreadable file, for a row without a text or a label (with its
            line number), for files without texts, and without ``short`` for fewer than two labels and an empty split.
    """
    if not source:
        raise ValueError(
            f"labels requires a source: pass labels:FILE, labels:FOLDER or the generated labels:{', '.join(LABELED)}"
        )
    contents: list[bytes | bytearray] = []
    if source in LABELED:
        given = {"train": list(LABELED[source]())}
        contents.append("".join(f"{words}\t{label}\n" for words, label in given["train"]).encode())
    else:
        given = {}
        for split, path in _files(expanded(Path(source))).items():
            contents.append(text.unpacked(path))
            given[split] = list(_rows(contents[-1], path))
    rows: dict[str, list[Row]] = {split: given.get(split, []) if split != "train" else [] for split in SPLITS}
    for row in given["train"]:
        split = _split(row[0])
        rows["train" if split in given else split].append(row)
    empty, every = [split for split, found in rows.items() if not found], list(itertools.chain(*rows.values()))
    if empty and short and every:
        rows = dict.fromkeys(rows, every)
    elif empty:
        raise ValueError(
            f"labels:{source} has {len(every)} texts, none of which is in {empty[0]}; about one in "
            f"{PARTS} goes to validation and one to the test, so add more texts"
        )
    labels = sorted({label for found in rows.values() for _, label in found}, key=_place)
    if len(labels) < 2 and not short:
        raise ValueError(f"labels:{source} has one label, {labels[0]!r}; a classifier requires at least two")
    number = {label: i for i, label in enumerate(labels)}
    splits = {
        split: (
            column(np.frombuffer(words.encode()[: length or MOST], np.uint8) for words, _ in found),
            torch.tensor([number[label] for _, label in found]),
        )
        for split, found in rows.items()
    }
    if empty:
        splits = dict.fromkeys(splits, splits["test"])
    longest = max(int(texts.ends.diff().max()) for texts, _ in splits.values())
    checksum = sha256(np.frombuffer(content, np.uint8) for content in contents)
    return Labeled(f"labels:{source}", tuple(labels), longest, checksum, splits)


def _files(source: Path) -> dict[str, Path]:
    """The file of each split that has one; a single file is for train."""
    if not source.exists():
        raise ValueError(
            f"no labeled texts at {source.absolute()}: there is no such file or folder; generated data: "
            f"{', '.join(LABELED)}"
        )
    if not source.is_dir():
        return {"train": source}
    found: dict[str, Path] = {}
    for path in sorted(path for path in source.iterdir() if path.is_file() and _kind(path)):
        split = path.name.partition(".")[0]
        if split in SPLITS:
            if split in found:
                raise ValueError(f"{source} has two files for {split}: {found[split].name} and {path.name}")
            found[split] = path
    if missing := [split for split in ("train", "test") if split not in found]:
        raise ValueError(f"the folder {source} has no file for {missing[0]}, such as {missing[0]}.jsonl or .tsv.gz")
    return found


def _kind(path: Path) -> str:
    """The format of a file by its suffix: .jsonl, .tsv or .csv; "" for any other."""
    name = path.with_suffix("") if path.suffix in PACKED else path
    return name.suffix if name.suffix in (".jsonl", *DIALECTS) else ""


def _rows(content: bytes | bytearray, path: Path) -> Iterator[Row]:
    """The rows of a file. Raises ValueError."""
    kind = _kind(path)
    if not kind:
        raise ValueError(f"{path}: expected a .jsonl, .tsv or .csv file, optionally with .gz or .xz")
    atomic_io.refuse_nul(content, path)
    try:
        words = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {number} of {path} is not UTF-8: byte {content[error.start]:#04x}") from error
    for number, found in _objects(words, path) if kind == ".jsonl" else _table(words, path, DIALECTS[kind]):
        where = f"line {number} of {path}"
        body, label = found.get("text"), found.get("label")
        if not isinstance(body, str) or not body:
            raise ValueError(f"{where}: its text must be a non-empty string, got {format_value(body)}")
        if type(label) not in (str, int) or len(str(label).split()) != 1 or str(label) != str(label).strip():
            raise ValueError(
                f"{where}: its label must be a word or an integer, without blanks, got {format_value(label)}"
            )
        for words in (body, str(label)):
            if not words.isascii():
                try:
                    words.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(f"{where} has half of a surrogate pair, {words[error.start]!r}") from error
        yield body, str(label)


def _objects(words: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = words.split("\n")
    # Nothing follows the last newline.
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {path} is not JSON: {' '.join(str(error).split())}") from error
        if not isinstance(found, dict):
            raise ValueError(f'line {number} of {path} must be an object, {{"text": ..., "label": ...}}')
        yield number, found


def _table(words: str, path: Path, dialect: str) -> Iterator[tuple[int, dict[str, Any]]]:
    limit = csv.field_size_limit(sys.maxsize)
    try:
        reader = csv.DictReader(io.StringIO(words, newline=""), dialect=dialect, strict=True)
        if missing := [name for name in ("text", "label") if name not in (reader.fieldnames or ())]:
            raise ValueError(f"line 1 of {path} must name the columns; {missing[0]!r} is missing")
        for row in reader:
            if None in row:
                raise ValueError(f"line {reader.line_num} of {path} has more columns than line 1")
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{path} is not a valid {dialect} table: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _split(words: str) -> str:
    """The split of a text, a function of the text only."""
    digest = hashlib.sha256(words.encode()).digest()
    return {0: "validation", 1: "test"}.get(int.from_bytes(digest[:8]) % PARTS, "train")


def _place(label: str) -> tuple[int, int, str]:
    """Sort key: numbers by value, then words alphabetically."""
    return (0, int(label), label) if label.isascii() and label.isdigit() else (1, 0, label)
