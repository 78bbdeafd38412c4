"""Streams: each row of a batch reads its own stretch of a text from call to call, and a state goes with it."""

from typing import NamedTuple

import torch
from torch import Tensor

from .dataset import Dataset


class Stretch(NamedTuple):
    """What the rows of one call read."""

    inputs: Tensor  # (B,N) int64: the token before each target, the start token where a row or a document begins
    targets: Tensor  # (B,N) int64
    fresh: Tensor  # (B,) bool: rows that begin with a document, so that they need a new state
    segments: Tensor | None  # (B,N) int64: the documents of each row, from 0 on; None where no row has two


class Stream:
    """A split of a text as whole windows, ``count`` of them, one after the other; what is left at its end is not read.

    The start token is ``dataset.vocab``. Raises ValueError for images, for a split that does not exist and one without
    a whole window.
    """

    def __init__(self, dataset: Dataset, split: str):
        if dataset.grid:
            raise ValueError(f"{dataset.name} is images, each an example of its own; only a text is read as a stream")
        if not dataset.count(split):
            raise ValueError(f"{split} of {dataset.name} has no window of {dataset.length} tokens to be read")
        self.text, self.length, self.start = dataset.splits[split], dataset.length, dataset.vocab
        self.documents = dataset.documents[split]
        self.count = len(self.text) // self.length

    def take(self, windows: Tensor, *, fresh: bool = False) -> Stretch:
        """The windows numbered ``windows`` (B,) int64 in 0 ... count-1. ``fresh``: nothing is known of what is before.

        The first token of a row follows the last one of the window before, unless a document begins there or the row
        is ``fresh``.
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
    """Which windows of ``count`` the rows of ``rank`` read in micro-batch number ``index``: ``-> (batch,) int64``.

    The ``batch * world`` rows begin evenly spaced, and each goes on by one window in every micro-batch: at its end a
    stretch goes over into the next row's, and the last window into the first. Of the rows ``rank`` has every
    ``world``-th, so that the ranks' parts together are the batch of one process with ``batch * world``.

    Raises ValueError for more rows than windows.

    >>> [row_windows(7, index, batch=2).tolist() for index in range(5)]
    [[0, 3], [1, 4], [2, 5], [3, 6], [4, 0]]
    """
    rows = batch * world
    if rows > count:
        raise ValueError(f"{rows} rows (batch x devices) cannot each read a stretch of their own of {count} windows")
    return (torch.arange(rank, rows, world) * count // rows + index) % count


def stretches(count: int, rows: int, chosen: int) -> list[range]:
    """``chosen`` of ``count`` windows as ``rows`` stretches, evenly spaced, none longer than another by two windows.

    >>> stretches(10, 2, 5), stretches(3, 2, 3)
    ([range(0, 3), range(5, 7)], [range(0, 1), range(1, 3)])
    """
    begins = [row * count // rows for row in range(rows)]
    room = [end - begin for begin, end in zip(begins, [*begins[1:], count], strict=True)]
    # Those with the most room first, so that no stretch reaches into the next one.
    longer = sorted(range(rows), key=lambda row: -room[row])[: chosen % rows]
    return [range(begin, begin + chosen // rows + (row in longer)) for row, begin in enumerate(begins)]
