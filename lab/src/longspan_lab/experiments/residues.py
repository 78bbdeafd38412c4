"""Proteins packed in rows, and the residues that a model must predict."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.proteins import RESIDUES, STANDARD

LEVELS = len(RESIDUES)
# Mask token, and start token in front of a protein.
MASK = START = LEVELS
# Devlin et al. 2018 (1810.04805), section 3.1: 15 % of the residues are predicted, and of these 80 % are masked,
# 10 % drawn anew and 10 % left.
ASKED, MASKED, DRAWN = 0.15, 0.8, 0.1
# Number of parts of the residues, each about as large as the predicted part in training.
SHARES = round(1 / ASKED)


class Rows(NamedTuple):
    """Several proteins per row, one after the other, and padding at its end."""

    tokens: Tensor  # (R,N) int64; 0 where nothing is real
    segments: Tensor  # (R,N) int64: the proteins of a row from 0 on, what is not real as one more
    real: Tensor  # (R,N) bool

    def take(self, rows: Tensor) -> "Rows":
        """Those numbered ``rows`` (B,) int64."""
        return Rows(*(part[rows] for part in self))


class Asked(NamedTuple):
    """Inputs of a model and the residues that it must predict."""

    inputs: Tensor  # (R,N) int64
    asked: Tensor  # (R,N) bool: residues to predict


def packed(lengths: Iterable[int], size: int) -> list[list[int]]:
    """Assign sequences of these ``lengths`` to rows of ``size``: the longest first, each where the least
    sufficient room is left.

    >>> packed([3, 2, 5, 2, 1], 6)
    [[2, 4], [0, 1], [3]]
    """
    order = sorted(enumerate(lengths), key=lambda one: (-one[1], one[0]))
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for i, length in order:
        at = bisect_left(rooms, (length, -1))
        room, row = rooms.pop(at) if at < len(rooms) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(rooms, (room - length, row))
    return rows


def rows(sequences: list[Tensor], size: int) -> Rows:
    """Sequences as rows of ``size`` tokens; longer ones are cut."""
    cut = [sequence[:size] for sequence in sequences]
    order = packed(map(len, cut), size)
    tokens = torch.zeros(len(order), size, dtype=torch.int64)
    segments, real = torch.zeros_like(tokens), torch.zeros(len(order), size, dtype=torch.bool)
    for row, chosen in enumerate(order):
        begin = 0
        for number, i in enumerate(chosen):
            end = begin + len(cut[i])
            tokens[row, begin:end], segments[row, begin:end], real[row, begin:end] = cut[i].long(), number, True
            begin = end
        segments[row, begin:] = len(chosen)
    return Rows(tokens, segments, real)


def causal(found: Rows) -> Asked:
    """Each residue from those before it in its protein: inputs are one behind, and begin with START."""
    first = torch.ones_like(found.real)
    first[:, 1:] = found.segments[:, 1:] != found.segments[:, :-1]
    return Asked(found.tokens.roll(1, 1).masked_fill(first, START), found.real)


def masked(found: Rows, random: torch.Generator) -> Asked:
    """Random residues, predicted from the others, as in the training of BERT."""
    draws, kinds = torch.rand(2, *found.tokens.shape, generator=random)
    others = torch.randint(0, STANDARD, found.tokens.shape, generator=random)
    asked = found.real & (draws < ASKED)
    inputs = found.tokens.masked_fill(asked & (kinds < MASKED), MASK)
    return Asked(torch.where(asked & (kinds >= 1 - DRAWN), others, inputs), asked)


def parts(found: Rows, random: torch.Generator, count: int) -> list[Asked]:
    """``count`` of SHARES disjoint parts of the residues, each predicted while all of it is masked.

    A model could copy residues that stay unchanged, as a tenth of BERT's do.
    """
    part = torch.randint(0, SHARES, found.tokens.shape, generator=random)
    asked = [found.real & (part == i) for i in range(count)]
    return [Asked(found.tokens.masked_fill(one, MASK), one) for one in asked]
