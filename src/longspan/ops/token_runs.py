"""Runs of c tokens, each of which becomes one entry once all its tokens are far enough behind.

Entry r of a document stands for its tokens r c ... r c + c - 1; each document starts at 0. ``at`` holds the numbers of
tokens in their documents, for real tokens gathered at the front, as in ``rows``. S is the number of tokens kept from
earlier calls, and k the number of entries that those calls have made.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import pick

NONE = 2**40  # the last token of a missing run: after every query


class Runs(NamedTuple):
    """The entries of one call: k of earlier calls, and P of its tokens, from the oldest to the newest."""

    number: Tensor  # (B,k+P) int64, which entry of its document
    end: Tensor  # (B,k+P) int64, its last token, counted from the first of the S tokens of earlier calls
    at: Tensor  # (B,S+N) int64, all tokens' numbers in their documents, negative where there is none
    size: int  # c
    old: int  # k
    slots: int  # S


def gone(at: Tensor, memory: int, size: int) -> Tensor:
    """Return how many runs of ``size`` lie more than ``memory`` tokens before each token number, any shape."""
    return (at - memory).clamp(min=0) // size


def find(at: Tensor, position: Tensor, slots: int, *, memory: int, size: int, old: int) -> Runs:
    """Find the runs of a call: at (B,N) after ``slots`` kept tokens, position (B,) tokens, ``old`` entries."""
    before = gone(position, memory, size)[:, None]
    earlier = position[:, None] - slots + torch.arange(slots, device=at.device)
    every = torch.cat([earlier, at], 1)
    # Tokens that are already in an entry do not form another.
    fresh = torch.cat([earlier >= before * size, torch.ones_like(at, dtype=torch.bool)], 1)
    last = fresh & ((every + 1) % size == 0)
    order = (~last).to(torch.uint8).argsort(dim=1, stable=True)[:, : every.shape[1] // size]
    end = torch.where(pick(last, order), order, NONE)
    kept = before - old + torch.arange(old, device=at.device)
    ends = slots + (kept + 1) * size - 1 - position[:, None]
    return Runs(torch.cat([kept, pick(every, order) // size], 1), torch.cat([ends, end], 1), every, size, old, slots)


def windows(tokens: Tensor, runs: Runs) -> Tensor:
    """Return the tokens of each new run, oldest first: (B,S+N,dim) -> (B,P,c,dim); arbitrary for missing runs."""
    end = runs.end[:, runs.old :, None] - torch.arange(runs.size - 1, -1, -1, device=tokens.device)
    return pick(tokens, end.flatten(1).clamp(0, max(tokens.shape[1] - 1, 0))).unflatten(1, (-1, runs.size))


def newest(entries: Tensor, runs: Runs, before: Tensor, after: Tensor, read: Tensor, *, memory: int) -> Tensor:
    """Return the entries that the next token sees: entries (B,k+P,dim) -> (B,k,dim), the newest in the last slot.

    ``before`` and ``after`` (B,) are the tokens of its document before and after the call, ``read`` (B,) the real
    tokens of the call.
    """
    slots = runs.slots
    first = slots + read - after  # where the last document begins
    made = (runs.end[:, runs.old :] < first[:, None]).sum(1)
    # The document that the state belongs to has made entries before.
    made = made - torch.where(first < slots, gone(before, memory, runs.size), 0)
    wanted = gone(after, memory, runs.size)[:, None] - runs.old + torch.arange(runs.old, device=after.device)
    place = wanted + made[:, None] + runs.old
    return pick(entries, place.clamp(0, entries.shape[1] - 1))


def left(end: Tensor, runs: Runs, read: Tensor, *, memory: int) -> Tensor:
    """Return in which segment of ``memory`` tokens of the call each run leaves the memory.

    end (B,E): the last tokens of the runs; read (B,1): the real tokens of the call -> (B,E), -1 for runs that do not
    leave it in this call.
    """
    last, first, after = runs.at.shape[1] - 1, runs.slots, end + memory
    # A run leaves the memory only if its document continues that long.
    same = pick(runs.at, after.clamp(max=last)) - pick(runs.at, end.clamp(max=last)) == memory
    return torch.where((after >= first) & (after < first + read) & same, (after - first) // memory, -1)
