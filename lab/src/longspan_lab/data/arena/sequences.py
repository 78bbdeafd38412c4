"""Sequences of different lengths with their classes, in fixed splits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan._utils.spec import known
from longspan.data.dataset import check_indices, sha256

SPLITS = ("train", "validation", "test")


class Batch(NamedTuple):
    """Some examples: of each, T sequences that belong together, which is 1 unless two are compared."""

    tokens: Tensor  # (B,T,N) int64, 0 where they are padded on the right
    mask: Tensor | None  # (B,T,N) bool, True on real tokens; None where all are
    labels: Tensor  # (B,) int64

    def to(self, device: str) -> "Batch":
        """The same on another device."""
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in self))  # pyright: ignore[reportArgumentType] (None only where None was)


class Sequences(NamedTuple):
    """The examples of one split."""

    tokens: Tensor  # (count,T,N) uint8
    lengths: Tensor  # (count,T) int64
    labels: Tensor  # (count,) int64


@dataclass(frozen=True, eq=False)
class Arena:
    """A task: examples of ``towers`` sequences of at most ``length`` tokens, each with one of ``classes``."""

    name: str
    vocab: int
    length: int
    towers: int
    classes: int
    checksum: str
    """sha256 (hex) of every split's tokens, lengths and labels in turn; equal ones mean equal data"""
    splits: Mapping[str, Sequences] = field(repr=False)
    grid: tuple[int, ...] = ()
    """an image's (height, width); () for what is none"""

    def count(self, split: str) -> int:
        """Examples in ``split``. Raises ValueError for a split that does not exist."""
        return len(self._split(split).labels)

    def take(self, split: str, indices: Tensor) -> Batch:
        """The examples numbered ``indices (B,) int64``, padded to the longest of them.

        Raises ValueError for a split that does not exist and for indices that are not int64 (B,) in 0 ... count-1.
        """
        part = self._split(split)
        check_indices(indices, len(part.labels), split)
        lengths = part.lengths[indices]
        longest = int(lengths.max()) if len(indices) else 0
        tokens = part.tokens[indices][..., :longest].long()
        mask = torch.arange(longest) < lengths[..., None]
        return Batch(tokens, None if bool(mask.all()) else mask, part.labels[indices])

    def majority(self, split: str) -> float:
        """The share of the most frequent class: what a guess without looking gets right."""
        labels = self._split(split).labels
        return int(labels.bincount().max()) / len(labels)

    def _split(self, split: str) -> Sequences:
        return self.splits[known(split, self.splits, "split")]


def arena(
    name: str, vocab: int, length: int, classes: int, splits: Mapping[str, Sequences], grid: tuple[int, ...] = ()
) -> Arena:
    """A task from its splits. Raises ValueError where one of them is empty."""
    for split in SPLITS:
        if not len(splits[split].labels):
            raise ValueError(f"{name} has no examples for {split}; add more data")
    arrays = [np.frombuffer(t.contiguous().numpy().tobytes(), np.uint8) for part in splits.values() for t in part]
    towers = splits["train"].tokens.shape[1]
    return Arena(name, vocab, length, towers, classes, sha256(arrays), splits, grid)


def rows(examples: Sequence[tuple[Sequence[bytes], int]], length: int) -> Sequences:
    """Examples, each some sequences of bytes and a class, as tensors; what is longer than ``length`` is cut."""
    towers = len(examples[0][0]) if examples else 1
    tokens = np.zeros((len(examples), towers, length), np.uint8)
    lengths = np.zeros((len(examples), towers), np.int64)
    for i, (sequences, _) in enumerate(examples):
        for j, sequence in enumerate(sequences):
            part = sequence[:length]
            tokens[i, j, : len(part)] = np.frombuffer(part, np.uint8)
            lengths[i, j] = len(part)
    labels = torch.tensor([label for _, label in examples], dtype=torch.int64)
    return Sequences(torch.from_numpy(tokens), torch.from_numpy(lengths), labels)


def images(pictures: Tensor, labels: Tensor) -> Sequences:
    """Pictures (count,height,width) uint8 as sequences of pixels, row by row."""
    tokens = pictures.flatten(1)[:, None].contiguous()
    return Sequences(tokens, torch.full((len(tokens), 1), tokens.shape[-1]), labels.long())


def balanced(labels: Tensor, most: int) -> Tensor:
    """Indices (n,) of at most ``most`` examples: the first of each class in turn, in file order."""
    turn = torch.zeros_like(labels)
    for label in labels.unique():
        here = labels == label
        turn[here] = torch.arange(int(here.sum()))
    # Sorting by the turn takes one of each class before the next of any.
    return turn.argsort(stable=True)[:most].sort().values
