"""Tokens on disk: the shards of a token folder as a data set, memory-mapped."""

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .._utils import atomic_io, sealed_dir
from .._utils.cache_dirs import expanded
from .._utils.spec import known
from . import text, token_shards, tokenization
from .dataset import check_indices, even, sha256

HELD = 2**24  # largest number of tokens of a held-out part
SPLITS = ("train", "validation", "test")


class MappedTokens:
    """Consecutive tokens in the shards of a folder, indexed as a tensor; nothing is read before it is indexed."""

    def __init__(self, shards: list[np.ndarray], ends: list[int], begin: int, size: int):
        self.shards, self.ends, self.begin, self.size = shards, ends, begin, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: Tensor) -> Tensor:
        """The tokens at the places ``at``, int64 of any shape in 0 ... len-1, as int64 of the same shape."""
        places = at.numpy().reshape(-1) + self.begin
        found = np.empty(len(places), np.int64)
        if len(places):
            first = bisect.bisect_right(self.ends, int(places.min()))
            last = bisect.bisect_right(self.ends, int(places.max()))
            for number in range(first, last + 1):
                low = self.ends[number - 1] if number else 0
                inside = (places >= low) & (places < self.ends[number])
                if inside.any():
                    found[inside] = self.shards[number][places[inside] - low]
        return torch.from_numpy(found).reshape(at.shape)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Windows of ``length`` tokens of a token folder, one after the other, in the splits train, validation and test.

    The files are memory-mapped: a process needs no memory for them but what the system caches.
    """

    name: str
    """the name given to ``load``"""
    vocab: int
    """levels a token can take"""
    length: int
    """tokens per example"""
    checksum: str
    """sha256 (hex) of the names, sizes and sha256 of all files in the index; equal ones mean equal data"""
    tokenizer: str = field(repr=False)
    """content of the tokenizer's file"""
    splits: Mapping[str, MappedTokens] = field(repr=False)
    """per split: its tokens"""
    documents: Mapping[str, Tensor] = field(repr=False)
    """per split: where its documents begin, (count,) int64 from 0 on"""
    grid: tuple[int, ...] = ()
    """(), as for a text"""
    unit: str = "token"
    """the unit in "bits per ..." """
    keyed: bool = True
    """whether the order of examples is computed instead of drawn; see ``order.batch_indices``"""

    def count(self, split: str) -> int:
        """Number of examples in ``split``: its disjoint windows. Raises ValueError for an unknown split."""
        return len(self.splits[known(split, self.splits, "split")]) // self.length

    def take(self, split: str, indices: Tensor) -> Tensor:
        """The examples of ``split`` with the ``indices`` (B,) int64, as (B, length) int64.

        Raises ValueError for an unknown split and for indices that are not int64 (B,) in 0 ... count-1.
        """
        check_indices(indices, self.count(split), split)
        return self.splits[split][indices[:, None] * self.length + torch.arange(self.length)]


def load(source: str, length: int, short: bool = False) -> Tokens:
    """Open a folder that ``longspan tokenize`` wrote.

    The last 5 %, but at most 2^24 tokens, are for the test, as many before them for validation, the rest for training.
    The sha256 of the index and of the tokenizer are compared, and the sizes of the other files. ``longspan tokenize
    --verify`` reads all files.

    Args:
        source: the folder.
        length: tokens per window; 0: 256.
        short: as in ``data.load``.

    Raises:
        ValueError: without a folder, for a folder that is not complete, a file that is missing or has another size
            than the index records, a tokenizer that was changed, and tokens too few for one window in each held-out
            part.
    """
    length = length or 256
    folder = expanded(source)
    index = token_shards.read_index(folder)
    for entry in index["files"]:
        path = folder / entry["name"]
        with atomic_io.reading(path):
            size = path.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(
                f"{path} has {size:,} bytes, and {token_shards.INDEX} records {entry['bytes']:,}; restore it from a "
                "copy, or write the folder again with longspan tokenize"
            )
    total = index["tokens"]
    held = min(total // 20, HELD)
    whole = short and 0 < total and held < length
    if held < length and not whole:
        raise ValueError(
            f"tokens:{source} has {total:,} tokens; windows of {length} need at least {20 * length:,}, so that each "
            "held-out part (5 %) has one; pass a smaller length or tokenize more text"
        )
    dtype = token_shards.DTYPES[index["dtype"]]
    shards = [_mapped(folder / one["name"], dtype, "r") for one in index["shards"]]
    ends = list(itertools.accumulate(one["tokens"] for one in index["shards"]))
    # Copy-on-write, because PyTorch warns of arrays that cannot be written.
    starts = torch.from_numpy(_mapped(folder / token_shards.DOCUMENTS, np.dtype("<i8"), "c"))
    splits, documents = _split(shards, ends, starts, 0 if whole else held)
    length = even(total, length) if whole else length
    tokenizer = token_shards.read_tokenizer(folder, index)
    # Without the paths of the inputs, so that the same tokens made elsewhere are equal data.
    checksum = sealed_dir.digest({name: index[name] for name in ("vocab", "dtype", "files")})
    return Tokens(f"tokens:{source}", index["vocab"], length, checksum, tokenizer, splits, documents)


def encoded(tokenizer: str, source: str, length: int, short: bool = False) -> Tokens:
    """Encode a text with a model's tokenizer, in memory, with the splits of ``load``.

    Args:
        tokenizer: content of the tokenizer's file.
        source: as in ``text.load``; each file is a document.
        length: tokens per window; 0: 256.
        short: as in ``data.load``.

    Raises:
        ValueError: for a text that cannot be read, is not UTF-8 or is too short.
        ImportError: without ``tokenizers``.
    """
    length, made = length or 256, tokenization.encoder(tokenizer)
    parts = []
    for content in text.documents_of(source):
        atomic_io.refuse_nul(content, f"text:{source}")
        try:
            words = content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"text:{source} is not UTF-8: {error}") from error
        parts += tokenization.encode(made, [words])
    found = np.array(list(itertools.chain.from_iterable(parts)), np.int64)
    held = len(found) // 20
    whole = short and 0 < len(found) and held < length
    if held < length and not whole:
        raise ValueError(
            f"text:{source} has {len(found):,} tokens; windows of {length} need at least {20 * length:,}, so that each "
            "held-out part (5 %) has one; pass a smaller length or a longer text"
        )
    starts = torch.tensor([0, *itertools.accumulate(map(len, parts))])[:-1].unique()
    splits, documents = _split([found], [len(found)], starts, 0 if whole else min(held, HELD))
    length = even(len(found), length) if whole else length
    vocab = tokenization.vocab_of(made)
    return Tokens(f"text:{source}", vocab, length, sha256([found.view(np.uint8)]), tokenizer, splits, documents)


def _split(
    shards: list[np.ndarray], ends: list[int], starts: Tensor, held: int
) -> tuple[dict[str, MappedTokens], dict[str, Tensor]]:
    """The splits of a stream and the documents of each; the last ``held`` tokens are for the test, as many before.

    With 0 of them, each split has all tokens.
    """
    total = ends[-1]
    parts = ((0, total - 2 * held), (total - 2 * held, held), (total - held, held)) if held else ((0, total),) * 3
    splits: dict[str, MappedTokens] = {}
    documents: dict[str, Tensor] = {}
    for split, (begin, size) in zip(SPLITS, parts, strict=True):
        splits[split] = MappedTokens(shards, ends, begin, size)
        documents[split] = _inside(starts, begin, begin + size)
    if not held:
        splits = dict.fromkeys(SPLITS, splits["test"])
    return splits, documents


def _inside(starts: Tensor, begin: int, end: int) -> Tensor:
    """The documents that begin in ``begin`` ... ``end`` - 1, relative to ``begin``; one that it cuts begins at 0."""
    first, last = torch.searchsorted(starts, torch.tensor([begin, end])).tolist()
    found = starts[first:last]
    if begin == 0 and len(found) and int(found[0]) == 0:
        return found  # a view of the mapped file
    found = found - begin
    return found if len(found) and int(found[0]) == 0 else torch.cat([found.new_zeros(1), found])


def _mapped(path: Path, dtype: np.dtype, mode: Literal["r", "c"]) -> np.ndarray:
    """The numbers of a file, memory-mapped."""
    with atomic_io.reading(path):
        if not path.stat().st_size:
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(path, dtype, mode))
