"""Pairs of a source and a target: the lines of a file or a generated task, in fixed splits, padded with masks."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
from .generated import TASKS

MOST = 256  # tokens of a source or a target, unless a length is given
PARTS = 20  # of which one is for validation and one for the test
LARGEST = 2**20  # levels of tokens: a row of the embedding each
IN_MEMORY = 32  # bytes for each byte of a file, while pairs are lists of numbers
Pair = tuple[list[int], list[int]]


class Batch(NamedTuple):
    """Some pairs, padded on the right to the longest of them; the masks are True on real tokens."""

    source: Tensor  # (B,M) int64
    source_mask: Tensor  # (B,M) bool
    target: Tensor  # (B,N) int64, the last real token is the stop token
    mask: Tensor  # (B,N) bool


class Column(NamedTuple):
    """Rows of different lengths, one after the other."""

    tokens: Tensor  # (all of them,) int32
    ends: Tensor  # (rows+1,) int64, where each row begins and the one before it ends

    def padded(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """indices (B,) -> rows (B,N) int64, 0 where they are padded, and the mask (B,N) of what is real."""
        begin, end = self.ends[indices], self.ends[indices + 1]
        places = torch.arange(int((end - begin).amax(0)) if len(indices) else 0)
        mask = places < (end - begin)[:, None]
        return self.tokens[torch.where(mask, begin[:, None] + places, 0)].long().masked_fill(~mask, 0), mask


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sources and targets of tokens 0 ... vocab-1, in the splits train, validation and test.

    The last level, ``vocab - 1``, is the stop token, with which every target ends and which no source has.
    """

    name: str
    """the name given to ``load``"""
    vocab: int
    """levels of a target's tokens, the stop token with them"""
    length: int
    """tokens of the longest source or target, the stop token with them"""
    checksum: str
    """sha256 (hex) of the unpacked file without a byte order mark, or of the generated pairs as one"""
    splits: Mapping[str, tuple[Column, Column]] = field(repr=False)
    """per split: sources and targets"""

    unit = "token"
    grid = ()

    @property
    def stop(self) -> int:
        """The token that ends a target."""
        return self.vocab - 1

    def count(self, split: str) -> int:
        """Pairs in ``split``. Raises ValueError for a split that does not exist."""
        return len(self._columns(split)[0].ends) - 1

    def mean(self, split: str) -> float:
        """Tokens of a target of ``split``, on average."""
        return int(self._columns(split)[1].ends[-1]) / max(1, self.count(split))

    def take(self, split: str, indices: Tensor) -> Batch:
        """The pairs numbered ``indices (B,) int64`` of ``split``.

        Raises ValueError for a split that does not exist and for indices that are not int64 (B,) in 0 ... count-1.
        """
        sources, targets = self._columns(split)
        check_indices(indices, self.count(split), split)
        return Batch(*sources.padded(indices), *targets.padded(indices))

    def _columns(self, split: str) -> tuple[Column, Column]:
        return self.splits[known(split, self.splits, "split")]


def load(source: str, length: int) -> Pairs:
    """The pairs of ``source``: "dates" or "reverse", which are generated, or a file with one of them in each line.

    A line has two columns of UTF-8, a source and a target with a tab between them, whose bytes are the tokens; in a
    file named .jsonl it is an object of two lists of whole numbers, ``{"source": [3, 1], "target": [1, 3]}``. Either
    may be packed: .gz, .xz, and may begin with a byte order mark, which is left out. A source or target may have
    ``length`` tokens (0 means 256), the stop token with them. Of the sources' sha256, one value in 20 means validation
    and one the test, so that equal sources are never in two splits and lines that are added move no other.

    Raises ValueError without a source, for a missing or unreadable file, and for a line that is no pair, is too long or
    leaves UTF-8, which it names by its number; and where a split would be empty.
    """
    if not source:
        raise ValueError(f"pairs need a source: pairs:FILE, or one that is generated, pairs:{' or pairs:'.join(TASKS)}")
    path, numbers = expanded(source), of_numbers(source)
    if source in TASKS:
        data = "".join(f"{one}\t{other}\n" for one, other in TASKS[source]()).encode()
    else:
        if not path.is_file():
            raise ValueError(
                f"no pairs at {path.absolute()}: there is no such file; pairs that are generated: {', '.join(TASKS)}"
            )
        data = atomic_io.without_mark(text.unpacked(path, times=IN_MEMORY))
    parts: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    highest, longest = 0, 0
    for pair in _lines(data, str(path), length or MOST, numbers):
        parts[_split(pair[0])].append(pair)
        longest = max(longest, len(pair[0]), len(pair[1]) + 1)
        highest = max(highest, *pair[0], *pair[1])
    if empty := [split for split, pairs in parts.items() if not pairs]:
        raise ValueError(
            f"pairs:{source} has {sum(map(len, parts.values()))} pairs, and none of them falls to {empty[0]}; about "
            f"one in {PARTS} sources goes to validation and one to the test, so there must be more of them"
        )
    stop = highest + 1 if numbers else 256
    splits = {
        split: (column(one for one, _ in pairs), column([*other, stop] for _, other in pairs))
        for split, pairs in parts.items()
    }
    return Pairs(f"pairs:{source}", stop + 1, longest, sha256([np.frombuffer(data, np.uint8)]), splits)


def of_numbers(source: str) -> bool:
    """Whether the pairs of this name are lists of numbers, and not text."""
    return Path(source).name.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl")


def encode(words: str, numbers: bool) -> list[int]:
    """Text as tokens: its bytes, or the whole numbers that stand in it between blanks.

    Raises ValueError for a word that is no such number.
    """
    if not numbers:
        return list(words.encode("utf-8", "surrogateescape"))
    if wrong := [word for word in words.split() if not (word.isascii() and word.isdigit())]:
        raise ValueError(f"this model reads whole numbers, e.g. '3 1 4', not {wrong[0]!r}")
    return [int(word) for word in words.split()]


def decode(tokens: list[int], numbers: bool) -> str:
    """Tokens as text; what is no UTF-8 becomes replacement characters."""
    return " ".join(map(str, tokens)) if numbers else bytes(tokens).decode("utf-8", "replace")


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of tokens -> (B,N) int64, 0 where they are padded on the right, and the mask (B,N) of what is real."""
    return column(rows).padded(torch.arange(len(rows)))


def _lines(data: bytes | bytearray, path: str, limit: int, numbers: bool) -> Iterator[Pair]:
    """The pairs of a file. Raises ValueError."""
    lines = data.split(b"\n")
    # Behind the last line's end there is no other line.
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        where = f"line {number} of {path}"
        line = line.removesuffix(b"\r")
        pair = _numbers(line, where) if numbers else _columns(line, where)
        for name, tokens, more in (("source", pair[0], 0), ("target", pair[1], 1)):
            if len(tokens) + more > limit:
                said = f"{len(tokens)} {'numbers' if numbers else 'bytes'}{' and the stop token' * more}"
                raise ValueError(
                    f"{where}: its {name} has {said}, more than length={limit}; shorten it, or train with a larger "
                    "length"
                )
        if not pair[0]:
            raise ValueError(f"{where}: its source is empty; a target has something to be made from")
        yield pair


def _columns(line: bytes | bytearray, where: str) -> Pair:
    columns = line.split(b"\t")
    if len(columns) != 2:
        raise ValueError(f"{where} has {len(columns)} columns; a pair is a source, one tab and a target")
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no UTF-8: byte {line[error.start]:#04x} at place {error.start + 1}") from error
    return list(columns[0]), list(columns[1])


def _numbers(line: bytes | bytearray, where: str) -> Pair:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {' '.join(str(error).split())}") from error
    wanted = '{"source": [...], "target": [...]}'
    if not isinstance(found, dict) or set(found) != {"source", "target"}:
        raise ValueError(f"{where} must be {wanted}, two lists of whole numbers, not {format_value(found)}")
    for name, tokens in found.items():
        if not isinstance(tokens, list):
            raise ValueError(f"{where}: its {name} must be a list of whole numbers, not {format_value(tokens)}")
        wrong = [token for token in tokens if type(token) is not int or not 0 <= token < LARGEST]
        if wrong:
            raise ValueError(
                f"{where}: its {name} has {format_value(wrong[0])}; tokens are whole numbers from 0 to {LARGEST - 1}"
            )
    return found["source"], found["target"]


def _split(source: list[int]) -> str:
    """The split of a source: a function of itself alone."""
    digest = hashlib.sha256(",".join(map(str, source)).encode()).digest()
    return {0: "validation", 1: "test"}.get(int.from_bytes(digest[:8]) % PARTS, "train")


def column(rows: Iterable[Any]) -> Column:
    """Rows of whole numbers, lists or arrays, as one column."""
    kept = [np.array(row, np.int32) for row in rows]
    ends = torch.tensor([0, *itertools.accumulate(map(len, kept))])
    # One more, so that rows which are all empty have something to be taken and masked.
    return Column(torch.from_numpy(np.concatenate([*kept, np.zeros(1, np.int32)])), ends)
