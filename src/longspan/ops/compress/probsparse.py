"""Which queries are far from attending evenly: a measure on a few keys, and softmax rows for those queries alone.

Source: Zhou et al. 2021 (2012.07436), section 3.1, for the measure and the choice among all queries; the choice among
the queries so far is our own.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import select_backend
from ..operands import transformed
from ..softmax import dense
from ..tensors import upcast_half
from . import blocks

EARLIEST = 64  # new queries up to which earlier ones are counted without sorting


def most(tokens: int, factor: int) -> int:
    """How many keys or queries are taken out of so many: factor * ceil(ln tokens), at least 1 and at most all."""
    return min(tokens, max(factor * math.ceil(math.log(max(tokens, 1))), 1))


def counts(tokens: Tensor, factor: int) -> Tensor:
    """``most`` for every number of a tensor, int64."""
    logs = tokens.clamp(min=1).double().log().ceil().long()
    return torch.minimum((factor * logs).clamp(min=1), tokens)


def sample(draw: int, at: Tensor, tokens: Tensor, factor: int, layer: int) -> tuple[Tensor, Tensor]:
    """The key of one draw for every query, and whether it has so many: at, tokens (B,N) -> (B,N) int64, (B,N) bool.

    A query at position ``at`` draws from the first ``tokens`` keys: they are cut into as many runs as there are draws,
    and each draw takes one of its run, by a hash of the layer, the position and the draw. So no key is drawn twice,
    with as many draws as keys each is drawn, and no random generator has a part in it.
    """
    draws = counts(tokens, factor).clamp(min=1)
    start, stop = tokens * draw // draws, tokens * (draw + 1) // draws
    key = start + _hash(layer, at, draw) % (stop - start).clamp(min=1)
    return key.clamp(min=0), draw < counts(tokens, factor)


def _hash(layer: int, at: Tensor, draw: int) -> Tensor:
    """Numbers below 2^32 that look random, by multiplications and shifts that stay below 2^63."""
    h = (at * 0x1E3779B1 + (draw * 0x05EBCA77 + layer * 0x02B2AE3D + 0x27D4EB2F)) & 0xFFFFFFFF
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x1B873593)):
        h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF
    return h ^ (h >> 16)


@torch.no_grad()
def measure(q: Tensor, k: Tensor, at: Tensor, tokens: Tensor, *, factor: int, layer: int) -> Tensor:
    """max - mean of each query's scores with the keys that it draws: (B,H,N), float32 at least, without a gradient.

    q (B,H,N,D), k (B,H,M,D), at (B|1,N) positions, tokens (B|1,N): each draws from the first so many keys, all of
    them real. O(N log M D) time, O(N D) memory.

    The mean is that of the drawn scores, as in the paper's eq. 5; the authors' code divides their sum by M.
    """
    q, k = upcast_half(q), upcast_half(k)
    largest = q.new_full(q.shape[:3], -torch.inf)
    total, drawn = torch.zeros_like(largest), counts(tokens, factor).clamp(min=1)[:, None]
    with torch.autocast(q.device.type, enabled=False):
        for draw in range(most(k.shape[2], factor)):
            key, there = sample(draw, at, tokens, factor, layer)
            key, there = key.clamp(max=k.shape[2] - 1), there[:, None]
            if len(key) == 1:
                keys = k[:, :, key[0]]
            else:
                keys = k.gather(2, key[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[-1]))
            score = (q * keys).sum(-1)
            largest = torch.where(there, torch.maximum(largest, score), largest)
            total = total + torch.where(there, score, 0.0)
    return torch.where(largest == -torch.inf, 0.0, largest - total / drawn) * q.shape[-1] ** -0.5


def earlier(x: Tensor) -> Tensor:
    """How many earlier numbers of a row are not smaller: (...,N) -> (...,N) int64, in O(N log^2 N).

    Halves of halves are merged: each number of a right half is counted against the left one.
    """
    n = x.shape[-1]
    levels = max(n - 1, 0).bit_length()
    padded = F.pad(x, (0, 2**levels - n), value=-torch.inf)
    found = torch.zeros(padded.shape, dtype=torch.long, device=x.device)
    for level in range(levels):
        pairs = padded.unflatten(-1, (-1, 2, 2**level))
        left, right = pairs[..., 0, :].sort(-1).values.contiguous(), pairs[..., 1, :].contiguous()
        more = 2**level - torch.searchsorted(left, right)
        found = found + torch.stack([torch.zeros_like(more), more], -2).flatten(-3)
    return found[..., :n]


def among_all(scores: Tensor, lengths: Tensor, factor: int) -> Tensor:
    """The queries whose measures are the largest of their row, of equal ones the first: (B,H,N) -> bool (B,H,N).

    ``lengths`` (B|1,) says how many of each row are real, which come first, and so how many are chosen.
    """
    real = torch.arange(scores.shape[-1], device=scores.device) < lengths[:, None]
    order = scores.masked_fill(~real[:, None], -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.zeros_like(order).scatter(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return rank < counts(lengths, factor)[:, None, None]


def among_earlier(scores: Tensor, at: Tensor, past: Tensor | None, before: Tensor | None, factor: int) -> Tensor:
    """The queries whose measures are among the largest so far, so many as ``counts`` allows at their place.

    scores (B,H,N) at positions ``at`` (B|1,N), and those of earlier calls, past (B,H,P), of which the first ``before``
    (B,) are real -> bool (B,H,N). Of equal ones the first are the larger. Nothing depends on what comes later.
    """
    rank = earlier(scores)
    if past is not None and before is not None and past.shape[-1]:
        gone = torch.arange(past.shape[-1], device=past.device) >= before[:, None]
        past = past.masked_fill(gone[:, None], -torch.inf)
        if scores.shape[-1] <= EARLIEST:
            rank = rank + (past[:, :, None] >= scores[..., None]).sum(-1)
        else:
            rank = rank + past.shape[-1] - torch.searchsorted(past.sort(-1).values, scores.contiguous())
    return rank < counts(at + 1, factor)[:, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, fill: Tensor, active: Tensor, seen: Tensor, *, rows: int | None = None
) -> Tensor:
    """Softmax rows for the ``active`` queries, ``fill`` for the others.

    q (B,H,N,D), k (B,H,M,D), v (B,H,M,E), fill (B,H,N,E), active bool (B,H,N), seen (B|1,N): each query sees the first
    so many keys -> (B,H,N,E). ``rows``: how many are active at most, where that is known without looking. Time is
    O(active M D), memory that of a block of active queries.
    """
    keys, (batch, heads, n) = torch.arange(k.shape[2], device=k.device), active.shape

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return dense.attend(q, k, v, mask=mask)

    fill = fill.to(v.dtype)
    every = select_backend("ProbSparse attention") == "reference" or transformed()
    if every or (rows is None and torch.compiler.is_compiling()):
        o = blocks.each(masked, q, k, v, lambda i, j: keys < seen[:, None, i:j, None])
        return torch.where(active[..., None], o, fill)
    few = int(active.sum(-1).max()) if rows is None else rows
    if not few:
        return fill
    index = (~active).to(torch.uint8).argsort(dim=-1, stable=True)[..., :few]  # (B,H,few)
    there, wide = active.gather(-1, index)[..., None], index[..., None]
    limit = seen[:, None].expand(batch, heads, n).gather(-1, index)
    asked = q.gather(2, wide.expand(-1, -1, -1, q.shape[-1]))
    o = blocks.each(masked, asked, k, v, lambda i, j: keys < limit[:, :, i:j, None])
    wide = wide.expand_as(o)
    return fill.scatter(2, wide, torch.where(there, o, fill.gather(2, wide)))
