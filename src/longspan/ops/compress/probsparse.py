"""ProbSparse attention: a measure of how unevenly a query attends, and softmax only for the queries with the largest.

The selection among the queries so far, ``among_earlier``, is not in the paper.

References:
    Zhou et al. 2021 (2012.07436), section 3.1, for the measure and the selection among all queries.
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

MAX_UNSORTED = 64  # new queries up to which earlier ones are counted without sorting


def most(tokens: int, factor: int) -> int:
    """Return the size of a sample of ``tokens`` keys or queries: factor * ceil(ln tokens), from 1 to ``tokens``."""
    return min(tokens, max(factor * math.ceil(math.log(max(tokens, 1))), 1))


def counts(tokens: Tensor, factor: int) -> Tensor:
    """Return ``most`` of each element, int64; 0 for no tokens."""
    logs = tokens.clamp(min=1).double().log().ceil().long()
    return torch.minimum((factor * logs).clamp(min=1), tokens)


def sample(draw: int, at: Tensor, tokens: Tensor, factor: int, layer: int) -> tuple[Tensor, Tensor]:
    """Sample one key for dense_form query, by a hash instead of a random generator.

    The first ``tokens`` keys are cut into one run per draw. Each draw takes one key of its run, chosen by a hash of the
    layer, the position and the draw. So no key is drawn twice, and with as many draws as keys all are drawn.

    Args:
        draw: Number of the draw, from 0.
        at: (B,N) positions of the queries.
        tokens: (B,N) number of keys that each query samples from.
        factor: Factor of the number of draws; see ``most``.
        layer: Number of the layer.

    Returns:
        The keys (B,N) int64, and whether the query has this draw (B,N) bool.
    """
    draws = counts(tokens, factor).clamp(min=1)
    start, stop = tokens * draw // draws, tokens * (draw + 1) // draws
    key = start + _hash(layer, at, draw) % (stop - start).clamp(min=1)
    return key.clamp(min=0), draw < counts(tokens, factor)


def _hash(layer: int, at: Tensor, draw: int) -> Tensor:
    """Pseudo-random numbers below 2^32; intermediate products stay below 2^63."""
    h = (at * 0x1E3779B1 + (draw * 0x05EBCA77 + layer * 0x02B2AE3D + 0x27D4EB2F)) & 0xFFFFFFFF
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x1B873593)):
        h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF
    return h ^ (h >> 16)


@torch.no_grad()
def measure(q: Tensor, k: Tensor, at: Tensor, tokens: Tensor, *, factor: int, layer: int) -> Tensor:
    """Compute max - mean of each query's scores with its sampled keys, in O(N log M D) time and O(N D) memory.

    The mean is over the sampled scores, as in the paper's eq. 5. The authors' code divides their sum by M.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,M,D) keys.
        at: (B|1,N) positions of the queries.
        tokens: (B|1,N) number of keys that each query samples from: the first ones, all of them real.
        factor: Factor of the number of draws; see ``most``.
        layer: Number of the layer.

    Returns:
        The measures (B,H,N), in float32 or float64, without a gradient.
    """
    q, k = upcast_half(q), upcast_half(k)
    largest = q.new_full(q.shape[:3], -torch.inf)
    total, drawn = torch.zeros_like(largest), counts(tokens, factor).clamp(min=1)[:, None]
    with torch.autocast(q.device.type, enabled=False):
        for draw in range(most(k.shape[2], factor)):
            key, valid = sample(draw, at, tokens, factor, layer)
            key, valid = key.clamp(max=k.shape[2] - 1), valid[:, None]
            if len(key) == 1:
                keys = k[:, :, key[0]]
            else:
                keys = k.gather(2, key[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[-1]))
            score = (q * keys).sum(-1)
            largest = torch.where(valid, torch.maximum(largest, score), largest)
            total = total + torch.where(valid, score, 0.0)
    return torch.where(largest == -torch.inf, 0.0, largest - total / drawn) * q.shape[-1] ** -0.5


def earlier(x: Tensor) -> Tensor:
    """Count the earlier numbers of a row that are not smaller: (...,N) -> (...,N) int64, in O(N log^2 N).

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
    """Select the queries with the largest measures of each row; among equal ones the first win.

    Args:
        scores: (B,H,N) measures.
        lengths: (B|1,) number of real queries of each row, which come first. It determines how many are selected.
        factor: Factor of the number of selected queries; see ``most``.

    Returns:
        A bool tensor (B,H,N).
    """
    real = torch.arange(scores.shape[-1], device=scores.device) < lengths[:, None]
    order = scores.masked_fill(~real[:, None], -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.zeros_like(order).scatter(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return rank < counts(lengths, factor)[:, None, None]


def among_earlier(scores: Tensor, at: Tensor, past: Tensor | None, before: Tensor | None, factor: int) -> Tensor:
    """Select the queries whose measures are among the largest so far, ``counts(at + 1, factor)`` of them.

    Among equal measures the first win. The selection of a query does not depend on later queries.

    Args:
        scores: (B,H,N) measures.
        at: (B|1,N) positions of the queries.
        past: (B,H,P) measures of earlier calls, or None.
        before: (B,) number of real entries of ``past``, which come first.
        factor: Factor of the number of selected queries; see ``most``.

    Returns:
        A bool tensor (B,H,N).
    """
    rank = earlier(scores)
    if past is not None and before is not None and past.shape[-1]:
        gone = torch.arange(past.shape[-1], device=past.device) >= before[:, None]
        past = past.masked_fill(gone[:, None], -torch.inf)
        if scores.shape[-1] <= MAX_UNSORTED:
            rank = rank + (past[:, :, None] >= scores[..., None]).sum(-1)
        else:
            rank = rank + past.shape[-1] - torch.searchsorted(past.sort(-1).values, scores.contiguous())
    return rank < counts(at + 1, factor)[:, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, fill: Tensor, active: Tensor, seen: Tensor, *, rows: int | None = None
) -> Tensor:
    """Compute softmax attention for the ``active`` queries, and return ``fill`` for the others.

    Takes O(active M D) time, and memory for one block of active queries.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,M,D) keys.
        v: (B,H,M,E) values.
        fill: (B,H,N,E) output of the other queries.
        active: (B,H,N) bool, the queries to compute.
        seen: (B|1,N) number of keys that each query sees, counted from the first.
        rows: Upper bound of the active queries in a row, if known without reading ``active``.

    Returns:
        The output (B,H,N,E).
    """
    keys, (batch, heads, n) = torch.arange(k.shape[2], device=k.device), active.shape

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return dense.attend(q, k, v, mask=mask)

    fill = fill.to(v.dtype)
    dense_form = select_backend("ProbSparse attention") == "reference" or transformed()
    if dense_form or (rows is None and torch.compiler.is_compiling()):
        o = blocks.each(masked, q, k, v, lambda i, j: keys < seen[:, None, i:j, None])
        return torch.where(active[..., None], o, fill)
    most_active = int(active.sum(-1).max()) if rows is None else rows
    if not most_active:
        return fill
    index = (~active).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most_active]  # (B,H,most_active)
    valid, wide = active.gather(-1, index)[..., None], index[..., None]
    limit = seen[:, None].expand(batch, heads, n).gather(-1, index)
    picked = q.gather(2, wide.expand(-1, -1, -1, q.shape[-1]))
    o = blocks.each(masked, picked, k, v, lambda i, j: keys < limit[:, :, i:j, None])
    wide = wide.expand_as(o)
    return fill.scatter(2, wide, torch.where(valid, o, fill.gather(2, wide)))
