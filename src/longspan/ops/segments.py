"""Cutting of a sequence into spans and chunks, and the borders of packed sequences in them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Borders(NamedTuple):
    """Masks of the segments in one span of G chunks of C tokens, 0 or 1 in the dtype of the data."""

    same: Tensor  # (B,1,G,C,C) query and key lie in one segment
    first: Tensor  # (B,1,G,C,1) the token's segment reaches in from before the chunk
    last: Tensor  # (B,1,G,C,1) the token's segment is the one that the chunk ends with
    whole: Tensor  # (B,1,G,1,1) the segment that reaches in is also the one that the chunk ends with


def numbered(segments: Tensor) -> Tensor:
    """Number segments (B,N) from 0, increasing at every border: an id that occurs again counts as a new segment."""
    return F.pad((segments[:, 1:] != segments[:, :-1]).long().cumsum(1), (1, 0))[:, : segments.shape[1]]


def borders_of(segments: Tensor, start: int, groups: int, chunk: int, like: Tensor) -> Borders:
    """Return the masks of segments (B,N) in the span of ``groups`` chunks that begins at ``start``."""
    ids = segments[:, start : start + groups * chunk].unflatten(1, (groups, chunk))[:, None]  # (B,1,G,C)
    before = torch.cat([segments[:, max(start - 1, 0)].view(-1, 1, 1), ids[:, :, :-1, -1]], 2)  # (B,1,G)
    first, last = ids == before[..., None], ids == ids[..., -1:]
    same = ids[..., :, None] == ids[..., None, :]
    return Borders(*(mask.to(like) for mask in (same, first[..., None], last[..., None], first[..., -1, None, None])))


def cut(n: int, chunk: int, tokens: int) -> list[tuple[int, int, int]]:
    """Cut n tokens into spans (start, chunks, tokens per chunk): full spans, the remaining full chunks, then the rest.

    A span has at most ``tokens`` tokens, but at least one chunk.
    """
    chunk = min(chunk, n)
    groups = max(tokens // chunk, 1)
    spans = [(start, groups, chunk) for start in range(0, n - groups * chunk + 1, groups * chunk)]
    done = len(spans) * groups * chunk
    whole, rest = divmod(n - done, chunk)
    if whole:
        spans.append((done, whole, chunk))
    if rest:
        spans.append((n - rest, 1, rest))
    return spans
