"""Streams: each row of a batch reads a stretch of a text from call to call, for training with carried states."""

from typing import NamedTuple

import torch
from torch import Tensor

from .dataset import Dataset
from .tokens import Tokens


class Stretch(NamedTuple):
    """The inputs and targets of one call."""

    inputs: Tensor  # (B,N) int64: the token before each target, the start token where a row or a document begins
    targets: Tensor  # (B,N) int64
    fresh: Tensor  # (B,) bool: rows that begin with a document and need a new state
    segments: Tensor | None  # (B,N) int64: the documents of each row, from 0 on; None if no row has two


class Stream:
    """A split of a text, or of tokens, as ``count`` whole consecutive windows; the incomplete rest is skipped.

    The start token is ``dataset.vocab``. Raises ValueError for images, for an unknown split and for one without a whole
    window.
    """

    def __init__(self, dataset: Dataset | Tokens, split: str):
        if dataset.grid:
            raise ValueError(f"{dataset.name} contains images; a stream requires a text")
        if not dataset.count(split):
            raise ValueError(f"split {split!r} of {dataset.name} has no window of {dataset.length} tokens")
        self.text, self.length, self.start = dataset.splits[split], dataset.length, dataset.vocab
        self.documents = dataset.documents[split]
        self.count = len(self.text) // self.length

    def take(self, windows: Tensor, *, fresh: bool = False) -> Stretch:
        """The windows with the indices ``windows`` (B,) int64 in 0 ... count-1.

        The first input of a row is the last token of the previous window, or the start token if a document begins
        there or if ``fresh``.
        """
        at = windows[:, None] * self.length + torch.arange(self.length)
        document = torch.searchsorted(self.documents, at, right=True) - 1
        begins = self.documents[document] == at
        if fresh:
            begins[:, 0] = True
        inputs = self.text[(at - 1).clamp(min=0)].long().masked_fill(begins, self.start)
        segments = document - document[:, :1]
        return Stretch(inputs, self.text[at].long(), begins[:, 0], segments if bool(segments.any()) else None)


def row_windows(count: int, index: int, batch: int, rank: int = 0, world: int = 1) -> Tensor:
    """The windows that the rows of ``rank`` read in micro-batch ``index``, (batch,) int64.

    The ``batch * world`` rows start evenly spaced over ``count`` windows and advance by one window in every
    micro-batch, from the last window to the first. ``rank`` has every ``world``-th row, so that all ranks together read
    the batch of a single process with ``batch * world``.

    Raises ValueError for more rows than windows.

    >>> [row_windows(7, index, batch=2).tolist() for index in range(5)]
    [[0, 3], [1, 4], [2, 5], [3, 6], [4, 0]]
    """
    rows = batch * world
    if rows > count:
        raise ValueError(f"{rows} rows (batch x devices) are more than the {count} windows of the text")
    return (torch.arange(rank, rows, world) * count // rows + index) % count


def stretches(count: int, rows: int, chosen: int) -> list[range]:
    """Split ``chosen`` of ``count`` windows into ``rows`` evenly spaced stretches whose lengths differ by at most one.

    >>> stretches(10, 2, 5), stretches(3, 2, 3)
    ([range(0, 3), range(5, 7)], [range(0, 1), range(1, 3)])
    """
    begins = [row * count // rows for row in range(rows)]
    room = [end - begin for begin, end in zip(begins, [*begins[1:], count], strict=True)]
    # The ones with the most room get an extra window, so that stretches do not overlap.
    longer = sorted(range(rows), key=lambda row: -room[row])[: chosen % rows]
    return [range(begin, begin + chosen // rows + (row in longer)) for row, begin in enumerate(begins)]
