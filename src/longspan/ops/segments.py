"""How a sequence is cut into spans and chunks, and where the borders of packed sequences lie in them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Borders(NamedTuple):
    """What segments mean inside one span of G chunks of C tokens; every mask is 0 or 1 in the data's dtype."""

    same: Tensor  # (B,1,G,C,C) query and key lie in one segment
    first: Tensor  # (B,1,G,C,1) the token's segment reaches in from before the chunk
    last: Tensor  # (B,1,G,C,1) the token's segment is the one that the chunk ends with
    whole: Tensor  # (B,1,G,1,1) the segment that reaches in is also the one that the chunk ends with


def numbered(segments: Tensor) -> Tensor:
    """Segments (B,N) by numbers that rise at every border, from 0 on: an id that comes back is a new one."""
    return F.pad((segments[:, 1:] != segments[:, :-1]).long().cumsum(1), (1, 0))[:, : segments.shape[1]]


def borders_of(segments: Tensor, start: int, groups: int, chunk: int, like: Tensor) -> Borders:
    """What segments (B,N) mean in the span of ``groups`` chunks that begins at ``start``."""
    ids = segments[:, start : start + groups * chunk].unflatten(1, (groups, chunk))[:, None]  # (B,1,G,C)
    before = torch.cat([segments[:, max(start - 1, 0)].view(-1, 1, 1), ids[:, :, :-1, -1]], 2)  # (B,1,G)
    first, last = ids == before[..., None], ids == ids[..., -1:]
    same = ids[..., :, None] == ids[..., None, :]
    return Borders(*(mask.to(like) for mask in (same, first[..., None], last[..., None], first[..., -1, None, None])))


def cut(n: int, chunk: int, tokens: int) -> list[tuple[int, int, int]]:
    """Cut n tokens into spans (start, chunks, tokens per chunk): whole ones, then the whole chunks left, then the rest.

    ``tokens``: how many a span may have at most; one chunk fits in any case.
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
