"""Softmax attention whose scores depend on how far apart query and key are, besides what the two hold.

Query i stands on key S + i, where S = M - N keys come before the first query; their distance is S + i - j. Its score is
content_i . k_j + position_i . r_{S+i-j}, times ``scale``.

Source: Dai et al. 2019 (1901.02860), section 3.3 and appendix B.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..backends import select_backend
from ..operands import transformed
from ..tensors import upcast_half

OP = "attention with relative positions"
FEWEST, MOST = 64, 512  # queries of one block

# The vectors r of the distances from the first to the second number, falling: (G,T,D), where G is H or 1.
Table = Callable[[int, int], Tensor]


class Older(NamedTuple):
    """Keys beyond those of single tokens, for n queries: at a distance of each query's own."""

    k: Tensor  # (B,G,P,D)
    v: Tensor  # (B,G,P,E)
    distance: Tensor  # (B|1,n,P) int64, at least 0 also where it is not seen
    visible: Tensor  # (B|1,n,P) bool


def attend(
    content: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    table: Table,
    far: Tensor,
    near: Tensor | None = None,
    *,
    back: int,
    ahead: int = 0,
    scale: float,
    older: Callable[[int, int], Older] | None = None,
    farthest: int = 0,
) -> Tensor:
    """content, position (B,H,N,D), k (B,G,M,D), v (B,G,M,E), G = H or 1 -> (B,H,N,E).

    ``far``, ``near`` (B|1,N) int64: how many keys before and behind its own each query sees, at most ``back`` and
    ``ahead`` (None: none behind). ``older(b, e)``: what queries b to e - 1 see besides, at most ``farthest`` away.

    Time and memory grow with N (back + ahead): queries go block by block, each computed again in the backward.
    """
    n, m = content.shape[2], k.shape[2]
    if not n or select_backend(OP) == "reference":
        more = older(0, n) if older is not None else None
        return dense(content, position, k, v, table, far, near, scale=scale, older=more, farthest=farthest)[0]
    size = min(max(back + ahead, FEWEST), MOST)
    spans = [(b, min(b + size, n)) for b in range(0, n, size)]
    top = max(min(back + size, m) - 1, farthest)
    bottom = -(min(ahead + size, n) - 1) if near is not None else 0
    r, outs, before = table(top, bottom), [], m - n
    block = _block
    # Transforms cannot follow what is computed again; a compiler plans its memory itself.
    if len(spans) > 1 and torch.is_grad_enabled() and not (transformed() or torch.compiler.is_compiling()):
        block = partial(checkpoint, _block, use_reentrant=False, preserve_rng_state=False)
    for b, e in spans:
        low, high = max(0, before + b - back), min(m, before + e + (ahead if near is not None else 0))
        queries, keys = slice(b, e), slice(low, high)
        # All distances in the block, of which a causal one needs none below 0: they are masked.
        first, last = before + e - 1 - low, (before + b - high + 1 if near is not None else 0)
        columns = slice(top - first, top - last + 1)
        older_ = None if older is None else older(b, e)
        near_ = None if near is None else near[:, queries]
        operands = content[:, :, queries], position[:, :, queries], k[:, :, keys], v[:, :, keys], r
        outs.append(block(*operands, columns, top, far[:, queries], near_, before + b - low, scale, older_))
    return torch.cat(outs, 2)


def _block(content, position, k, v, r, columns, top, far, near, before, scale, older) -> Tensor:
    n, m = content.shape[2], k.shape[2]
    if older is None:
        shifted, more = shift(position @ r[:, columns].mT, m), None
    else:
        products = position @ r.mT
        shifted = shift(products[..., columns], m)
        away = (top - older.distance)[:, None].expand(len(content), content.shape[1], -1, -1)
        more = products.gather(-1, away)
    return _read(content, k, v, shifted, visible(n, m, before, far, near), scale, older, more)[0]


def _read(content, k, v, apart, allowed, scale, older, more) -> tuple[Tensor, Tensor, Tensor]:
    logits = upcast_half(content @ k.mT) + upcast_half(apart)
    if older is not None:
        beyond = upcast_half(content @ older.k.mT) + upcast_half(more)
        logits, v = torch.cat([beyond, logits], -1), torch.cat([older.v, v], 2)
        seen = older.visible[:, None].expand(len(content), -1, -1, -1)
        allowed = torch.cat([seen, allowed.expand(len(content), -1, -1, -1)], -1)
    # A query sees its own key at least, so no row is empty.
    p = (logits * scale).masked_fill(~allowed, -torch.inf).softmax(-1)
    return p.to(v.dtype) @ v, p, allowed


def shift(products: Tensor, m: int) -> Tensor:
    """Products with the vectors of falling distances -> those of query i and key j: (...,n,T) -> (...,n,m).

    Column c is of distance first - c, where ``first`` is that of the last query and the first key, so entry (i,j) comes
    from column n - 1 - i + j. With T = n + m - 1 columns each is there; with fewer, an entry beyond them holds a
    number of the next row and must be masked.
    """
    n, t = products.shape[-2:]
    # One more column makes each row of the flat numbers begin one place later.
    flat = F.pad(products, (1, 0)).flatten(-2)
    return flat[..., n:].unflatten(-1, (n, t))[..., :m]


def visible(n: int, m: int, before: int, far: Tensor, near: Tensor | None) -> Tensor:
    """Which of m keys, of which ``before`` come before the first query's, each query sees: bool (B|1,1,n,m)."""
    distance = distances(n, m, before, far.device)
    allowed = distance <= far[:, :, None]
    allowed = allowed & (distance >= 0 if near is None else -distance <= near[:, :, None])
    return allowed[:, None]


def distances(n: int, m: int, before: int, device: torch.device) -> Tensor:
    """before + i - j, (n,m)."""
    return before + torch.arange(n, device=device)[:, None] - torch.arange(m, device=device)


def dense(
    content: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    table: Table,
    far: Tensor,
    near: Tensor | None = None,
    *,
    scale: float,
    older: Older | None = None,
    farthest: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, each pair by its distance: -> (B,H,N,E), weights (B,H,N,P+M), which are seen (B|1,1,N,P+M)."""
    n, m = content.shape[2], k.shape[2]
    top, bottom = max(m - 1, farthest, 0), min(1 - n, 0)
    distance, r = distances(n, m, m - n, k.device), table(top, bottom)
    # (G,n,m,D), and (B,G,n,P,D) below.
    apart, more = (position[:, :, :, None] * r[:, top - distance]).sum(-1), None
    if older is not None:
        more = (position[:, :, :, None] * r[:, top - older.distance].movedim(0, 1)).sum(-1)
    return _read(content, k, v, apart, visible(n, m, m - n, far, near), scale, older, more)


def absorb(q: Tensor, weight: Tensor) -> Tensor:
    """Queries that meet what keys are projected from: q (B,H,N,D), weight (H*D,C) of the keys -> (B,H,N,C).

    (W q).k = q.(W^T k), so keys W^T k are never made. Worth it where there are fewer queries than channels of a head.
    """
    return q @ weight.unflatten(0, (q.shape[1], -1))


def release(o: Tensor, weight: Tensor) -> Tensor:
    """What heads read of inputs as what they read of values: o (B,H,N,C), weight (H*D,C) -> (B,H,N,D)."""
    return o @ weight.unflatten(0, (o.shape[1], -1)).mT
