"""Pairs of a source and a target from a file or a generated task, in fixed splits, padded with masks."""

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

MOST = 256  # default limit of tokens in a source or a target
PARTS = 20  # of which one is for validation and one for the test
LARGEST = 2**20  # largest number of levels; each has a row of the embedding
IN_MEMORY = 32  # bytes of memory per byte of a file, while pairs are lists
Pair = tuple[list[int], list[int]]


class Batch(NamedTuple):
    """A batch of pairs, padded on the right; masks are True on real tokens."""

    source: Tensor  # (B,M) int64
    source_mask: Tensor  # (B,M) bool
    target: Tensor  # (B,N) int64, the last real token is the stop token
    mask: Tensor  # (B,N) bool


class Column(NamedTuple):
    """Rows of different lengths, concatenated."""

    tokens: Tensor  # (all of them,) int32
    ends: Tensor  # (rows+1,) int64, where each row begins and the one before it ends

    def padded(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of ``indices`` (B,) as (B, N) int64, padded with 0, and the mask (B, N) of real tokens."""
        begin, end = self.ends[indices], self.ends[indices + 1]
        places = torch.arange(int((end - begin).amax(0)) if len(indices) else 0)
        mask = places < (end - begin)[:, None]
        return self.tokens[torch.where(mask, begin[:, None] + places, 0)].long().masked_fill(~mask, 0), mask


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sources and targets of tokens 0 ... vocab-1, in the splits train, validation and test.

    The last level, ``vocab - 1``, is the stop token. It ends every target and is in no source.
    """

    name: str
    """the name given to ``load``"""
    vocab: int
    """levels of a target's tokens, including the stop token"""
    length: int
    """tokens of the longest source or target, including the stop token"""
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
        """Mean number of tokens of the targets in ``split``."""
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


def load(source: str, length: int, short: bool = False) -> Pairs:
    """Load pairs.

    A line of a text file has a source and a target in UTF-8, separated by a tab; the bytes are the tokens. A line of a
    .jsonl file is an object of two lists of integers, ``{"source": [3, 1], "target": [1, 3]}``. Files may be packed as
    .gz or .xz; a byte order mark is removed. The sha256 of the source determines the split: one value in 20 is
    validation, one is test. So equal sources are in the same split, and added lines do not move others.

    Args:
        source: "dates" or "reverse" (generated), or a file.
        length: largest number of tokens in a source or a target, including the stop token; 0: 256.
        short: as in ``data.load``.

    Raises:
        ValueError: without a source, for a missing or unreadable file, for an invalid or too long line (with its
            number), for a file without pairs, and without ``short`` for an empty split.
    """
    if not source:
        raise ValueError(f"pairs requires a source: pass pairs:FILE, or the generated pairs:{' or pairs:'.join(TASKS)}")
    path, numbers = expanded(source), of_numbers(source)
    if source in TASKS:
        data = "".join(f"{one}\t{other}\n" for one, other in TASKS[source]()).encode()
    else:
        if not path.is_file():
            raise ValueError(
                f"no pairs at {path.absolute()}: there is no such file; generated pairs: {', '.join(TASKS)}"
            )
        data = atomic_io.without_mark(text.unpacked(path, times=IN_MEMORY))
        atomic_io.refuse_nul(data, path)
    parts: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    highest, longest = 0, 0
    for pair in _lines(data, str(path), length or MOST, numbers):
        parts[_split(pair[0])].append(pair)
        longest = max(longest, len(pair[0]), len(pair[1]) + 1)
        highest = max(highest, *pair[0], *pair[1])
    empty, every = [split for split, pairs in parts.items() if not pairs], list(itertools.chain(*parts.values()))
    if empty and short and every:
        parts = dict.fromkeys(parts, every)
    elif empty:
        raise ValueError(
            f"pairs:{source} has {len(every)} pairs, none of which is in {empty[0]}; about one "
            f"in {PARTS} sources goes to validation and one to the test, so add more pairs"
        )
    stop = highest + 1 if numbers else 256
    splits = {
        split: (column(one for one, _ in pairs), column([*other, stop] for _, other in pairs))
        for split, pairs in parts.items()
    }
    if empty:
        splits = dict.fromkeys(splits, splits["test"])
    return Pairs(f"pairs:{source}", stop + 1, longest, sha256([np.frombuffer(data, np.uint8)]), splits)


def of_numbers(source: str) -> bool:
    """Whether the pairs of this name are lists of numbers, not text."""
    return Path(source).name.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl")


def encode(words: str, numbers: bool) -> list[int]:
    """Text as tokens: its bytes, or (``numbers``) the integers in it, separated by blanks.

    Raises ValueError for a word that is not such an integer.
    """
    if not numbers:
        return list(words.encode("utf-8", "surrogateescape"))
    if wrong := [word for word in words.split() if not (word.isascii() and word.isdigit())]:
        raise ValueError(f"this model reads integers, e.g. '3 1 4', not {wrong[0]!r}")
    return [int(word) for word in words.split()]


def decode(tokens: list[int], numbers: bool) -> str:
    """Tokens as text; invalid UTF-8 becomes replacement characters."""
    return " ".join(map(str, tokens)) if numbers else bytes(tokens).decode("utf-8", "replace")


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of tokens as (B, N) int64, padded with 0 on the right, and the mask (B, N) of real tokens."""
    return column(rows).padded(torch.arange(len(rows)))


def _lines(data: bytes | bytearray, path: str, limit: int, numbers: bool) -> Iterator[Pair]:
    """The pairs of a file. Raises ValueError."""
    lines = data.split(b"\n")
    # Nothing follows the last newline.
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        where = f"line {number} of {path}"
        line = line.removesuffix(b"\r")
        pair = _numbers(line, where) if numbers else _columns(line, where)
        for name, tokens, more in (("source", pair[0], 0), ("target", pair[1], 1)):
            if len(tokens) + more > limit:
                size = f"{len(tokens)} {'numbers' if numbers else 'bytes'}{' and the stop token' * more}"
                raise ValueError(
                    f"{where}: its {name} has {size}, more than length={limit}; shorten it, or train with a larger "
                    "length"
                )
        if not pair[0]:
            raise ValueError(f"{where}: its source is empty; a source needs at least one token")
        yield pair


def _columns(line: bytes | bytearray, where: str) -> Pair:
    columns = line.split(b"\t")
    if len(columns) != 2:
        raise ValueError(f"{where} has {len(columns)} columns; expected a source, one tab and a target")
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: byte {line[error.start]:#04x} at place {error.start + 1}") from error
    return list(columns[0]), list(columns[1])


def _numbers(line: bytes | bytearray, where: str) -> Pair:
    try:
        # Not the bytes, which json would take for UTF-16 or UTF-32 where zeros are among them.
        found = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {' '.join(str(error).split())}") from error
    wanted = '{"source": [...], "target": [...]}'
    if not isinstance(found, dict) or set(found) != {"source", "target"}:
        raise ValueError(f"{where} must be {wanted}, two lists of integers, got {format_value(found)}")
    for name, tokens in found.items():
        if not isinstance(tokens, list):
            raise ValueError(f"{where}: its {name} must be a list of integers, got {format_value(tokens)}")
        wrong = [token for token in tokens if type(token) is not int or not 0 <= token < LARGEST]
        if wrong:
            raise ValueError(
                f"{where}: its {name} has {format_value(wrong[0])}; tokens are integers from 0 to {LARGEST - 1}"
            )
    return found["source"], found["target"]


def _split(source: list[int]) -> str:
    """The split of a source, a function of the source only."""
    digest = hashlib.sha256(",".join(map(str, source)).encode()).digest()
    return {0: "validation", 1: "test"}.get(int.from_bytes(digest[:8]) % PARTS, "train")


def column(rows: Iterable[Any]) -> Column:
    """Rows of integers, lists or arrays, as a ``Column``."""
    kept = [np.array(row, np.int32) for row in rows]
    ends = torch.tensor([0, *itertools.accumulate(map(len, kept))])
    # One extra element, so that indexing works if all rows are empty.
    return Column(torch.from_numpy(np.concatenate([*kept, np.zeros(1, np.int32)])), ends)
