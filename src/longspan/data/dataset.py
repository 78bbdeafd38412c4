"""Data sets of images or text: examples of equal length as integers, in fixed splits."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .._utils.spec import known


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples of ``length`` tokens 0 ... vocab-1, in the splits train, validation and test.

    Images are stored one per row; text is stored as one stream per split and cut into windows on access.
    """

    name: str
    """the name given to ``load``"""
    vocab: int
    """levels a token can take"""
    length: int
    """tokens per example"""
    grid: tuple[int, ...]
    """an image's (height, width) or (height, width, channels), tokens along the last axis first; () for text"""
    unit: str
    """the unit in "bits per ...": dim or byte"""
    checksum: str
    """sha256 (hex) of every split's images and labels in turn, or of the whole text; equal ones mean equal data"""
    splits: Mapping[str, Tensor] = field(repr=False)
    """per split: images (count, length) uint8, text (bytes,) uint8"""
    labels: Mapping[str, Tensor] = field(repr=False)
    """per split: classes (count,) int64 for images; empty for text"""
    documents: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """per split of a text: where its documents begin, (count,) int64 from 0 on; empty for images"""

    def count(self, split: str) -> int:
        """Number of examples in ``split``. Text: all windows of ``length`` bytes in train, disjoint ones elsewhere.

        Raises ValueError for a split that does not exist.
        """
        return len(self._rows(split))

    def take(self, split: str, indices: Tensor) -> Tensor:
        """The examples of ``split`` with the ``indices`` (B,) int64, as (B, length) int64.

        Raises ValueError for an unknown split and for indices that are not int64 (B,) in 0 ... count-1.
        """
        rows = self._rows(split)
        check_indices(indices, len(rows), split)
        return rows[indices].long()

    def picture(self, rows: Tensor) -> Tensor:
        """Tokens (B, length) as images (B, height, width) or (B, height, width, 3) uint8.

        Level 0 becomes 0 and level vocab-1 becomes 255.

        Raises ValueError for text, for rows of another shape and for tokens outside 0 ... vocab-1.
        """
        if not self.grid:
            raise ValueError(f"{self.name} is text; picture() requires images")
        if rows.ndim != 2 or rows.shape[1] != self.length or rows.is_floating_point():
            raise ValueError(
                f"rows of {self.name} must be integers of shape (B, {self.length}); got {rows.dtype} "
                f"of {tuple(rows.shape)}"
            )
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.vocab:
            raise ValueError(f"tokens {int(rows.min())} ... {int(rows.max())} are outside 0 ... {self.vocab - 1}")
        return (rows * (255 / (self.vocab - 1))).round().to(torch.uint8).reshape(-1, *self.grid)

    def _rows(self, split: str) -> Tensor:
        stored = self.splits[known(split, self.splits, "split")]
        # A view; overlapping windows use no memory until they are indexed.
        return stored if self.grid else stored.unfold(0, self.length, 1 if split == "train" else self.length)


def images(name: str, grid: tuple[int, ...], vocab: int, parts: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Dataset:
    """A data set of images from per-split (images (n, ...) uint8 in token order, labels (n,))."""
    length = math.prod(grid)
    return Dataset(
        name,
        vocab,
        length,
        grid,
        "dim",
        sha256(array for part in parts.values() for array in part),
        {split: torch.from_numpy(np.array(rows, np.uint8).reshape(-1, length)) for split, (rows, _) in parts.items()},
        {split: torch.from_numpy(np.array(classes, np.int64)) for split, (_, classes) in parts.items()},
    )


def check_indices(indices: Tensor, count: int, split: str) -> None:
    """Raise ValueError unless ``indices`` are int64 (B,) in 0 ... count-1."""
    if indices.dtype != torch.int64 or indices.ndim != 1:
        raise ValueError(f"indices must be int64 of shape (B,); got {indices.dtype} of shape {tuple(indices.shape)}")
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < count:
        low, high = int(indices.min()), int(indices.max())
        raise ValueError(f"indices {low} ... {high} are outside 0 ... {count - 1}, the examples of {split}")


def even(size: int, length: int) -> int:
    """The length of equal windows of up to ``length``, so that the rest of ``size`` that none of them has is small.

    >>> even(300, 256), even(100, 256), even(512, 256)
    (150, 100, 256)
    """
    return size // -(-size // length)


def sha256(arrays: Iterable[np.ndarray]) -> str:
    """The sha256 (hex) of arrays of bytes, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, np.uint8).data)
    return digest.hexdigest()
