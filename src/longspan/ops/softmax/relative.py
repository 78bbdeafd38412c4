"""Softmax attention whose scores depend on content and on the distance of query and key.

Query i is at key S + i, where S = M - N keys precede the first query; the distance to key j is S + i - j. The score is
content_i . k_j + position_i . r_{S+i-j}, times ``scale``.

Reference: Dai et al. 2019 (1901.02860), section 3.3 and appendix B.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..backends import select_backend
from ..operands import followed
from ..tensors import upcast_half

OP = "attention with relative positions"
FEWEST, MOST = 64, 512  # queries of one block

# The vectors r of the distances from the first down to the second number: (G,T,D), where G is H or 1.
Table = Callable[[int, int], Tensor]


class Older(NamedTuple):
    """Further keys for n queries, such as compressed ones, with a separate distance for each query."""

    k: Tensor  # (B,G,P,D)
    v: Tensor  # (B,G,P,E)
    distance: Tensor  # (B|1,n,P) int64, at least 0 even if not visible
    visible: Tensor  # (B|1,n,P) bool


class Operands(NamedTuple):
    """Operands of attention with relative positions."""

    content: Tensor  # (B,H,N,D), the queries for the content
    position: Tensor  # (B,H,N,D), the queries for the position
    k: Tensor  # (B,G,M,D), where G is H or 1
    v: Tensor  # (B,G,M,E)
    table: Table  # the vectors of a range of distances
    far: Tensor  # (B|1,N) int64, the number of keys before its own that each query sees
    near: Tensor | None  # (B|1,N) int64, the number of keys after its own; None for causal attention
    scale: float  # multiplies the scores


def attend(
    r: Operands,
    *,
    back: int,
    ahead: int = 0,
    older: Callable[[int, int], Older] | None = None,
    farthest: int = 0,
) -> Tensor:
    """Softmax attention with relative positions, block by block. Time and memory grow with N (back + ahead).

    Args:
        r: The operands.
        back: The largest value in ``far``.
        ahead: The largest value in ``near``.
        older: ``older(b, e)`` returns further keys of queries b to e - 1.
        farthest: The largest distance of those keys.

    Returns:
        (B,H,N,E). The backward pass recomputes each block.
    """
    content, position, k, v, table, far, near, scale = r
    n, m = content.shape[2], k.shape[2]
    if not n or select_backend(OP) == "reference":
        more = older(0, n) if older is not None else None
        return dense(r, more, farthest)[0]
    size = min(max(back + ahead, FEWEST), MOST)
    spans = [(b, min(b + size, n)) for b in range(0, n, size)]
    top = max(min(back + size, m) - 1, farthest)
    bottom = -(min(ahead + size, n) - 1) if near is not None else 0
    vectors, before = table(top, bottom), m - n

    def attended(b: int, e: int, older: Older | None) -> Tensor:
        """Queries b to e - 1."""
        low, high = max(0, before + b - back), min(m, before + e + (ahead if near is not None else 0))
        queries, keys = slice(b, e), slice(low, high)
        # All distances in the block. Causal blocks need none below 0, since those are masked.
        first, last = before + e - 1 - low, (before + b - high + 1 if near is not None else 0)
        columns = slice(top - first, top - last + 1)
        if older is None:
            shifted, more = shift(position[:, :, queries] @ vectors[:, columns].mT, high - low), None
        else:
            products = position[:, :, queries] @ vectors.mT
            shifted = shift(products[..., columns], high - low)
            away = (top - older.distance)[:, None].expand(len(content), content.shape[1], -1, -1)
            more = products.gather(-1, away)
        allowed = visible(
            e - b, high - low, before + b - low, far[:, queries], None if near is None else near[:, queries]
        )
        return _read(content[:, :, queries], k[:, :, keys], v[:, :, keys], shifted, allowed, scale, older, more)[0]

    block = attended
    # Transforms cannot follow checkpointed blocks; a compiler plans its memory itself.
    if len(spans) > 1 and torch.is_grad_enabled() and not followed():
        block = partial(checkpoint, attended, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([block(b, e, None if older is None else older(b, e)) for b, e in spans], 2)


def _read(
    content: Tensor,
    k: Tensor,
    v: Tensor,
    apart: Tensor,
    allowed: Tensor,
    scale: float,
    older: Older | None,
    more: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = upcast_half(content @ k.mT) + upcast_half(apart)
    if older is not None and more is not None:
        beyond = upcast_half(content @ older.k.mT) + upcast_half(more)
        logits, v = torch.cat([beyond, logits], -1), torch.cat([older.v, v], 2)
        seen = older.visible[:, None].expand(len(content), -1, -1, -1)
        allowed = torch.cat([seen, allowed.expand(len(content), -1, -1, -1)], -1)
    # A query sees its own key at least, so no row is empty.
    p = (logits * scale).masked_fill(~allowed, -torch.inf).softmax(-1)
    return p.to(v.dtype) @ v, p, allowed


def shift(products: Tensor, m: int) -> Tensor:
    """Turn products per distance, in falling order, into products per query i and key j: (...,n,T) -> (...,n,m).

    Column c belongs to distance first - c, where ``first`` is the distance of the last query and the first key. So
    entry (i,j) comes from column n - 1 - i + j. With T = n + m - 1 columns all entries exist. With fewer, an entry
    beyond them holds a number of the next row and must be masked.
    """
    n, t = products.shape[-2:]
    # One more column shifts each row of the flattened numbers by one place.
    flat = F.pad(products, (1, 0)).flatten(-2)
    return flat[..., n:].unflatten(-1, (n, t))[..., :m]


def visible(n: int, m: int, before: int, far: Tensor, near: Tensor | None) -> Tensor:
    """Return which of m keys each query sees, ``before`` of them before the first query: bool (B|1,1,n,m)."""
    distance = distances(n, m, before, far.device)
    allowed = distance <= far[:, :, None]
    allowed = allowed & (distance >= 0 if near is None else -distance <= near[:, :, None])
    return allowed[:, None]


def distances(n: int, m: int, before: int, device: torch.device) -> Tensor:
    """Return before + i - j, (n,m)."""
    return before + torch.arange(n, device=device)[:, None] - torch.arange(m, device=device)


def dense(r: Operands, older: Older | None = None, farthest: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, pair by pair: -> (B,H,N,E), weights (B,H,N,P+M), which are visible (B|1,1,N,P+M)."""
    content, position, k, v, table, far, near, scale = r
    n, m = content.shape[2], k.shape[2]
    top, bottom = max(m - 1, farthest, 0), min(1 - n, 0)
    distance, vectors = distances(n, m, m - n, k.device), table(top, bottom)
    # (G,n,m,D), and (B,G,n,P,D) below.
    apart, more = (position[:, :, :, None] * vectors[:, top - distance]).sum(-1), None
    if older is not None:
        more = (position[:, :, :, None] * vectors[:, top - older.distance].movedim(0, 1)).sum(-1)
    return _read(content, k, v, apart, visible(n, m, m - n, far, near), scale, older, more)


def absorb(q: Tensor, weight: Tensor) -> Tensor:
    """Return queries for the inputs of the key projection: q (B,H,N,D), weight (H*D,C) of the keys -> (B,H,N,C).

    (W q).k = q.(W^T k), so the keys W^T k are not computed. Useful with fewer queries than channels of a head.
    """
    return q @ weight.unflatten(0, (q.shape[1], -1))


def release(o: Tensor, weight: Tensor) -> Tensor:
    """Project inputs that heads have read to values: o (B,H,N,C), weight (H*D,C) -> (B,H,N,D)."""
    return o @ weight.unflatten(0, (o.shape[1], -1)).mT
