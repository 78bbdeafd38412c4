"""Softmax attention inside lists of tokens, where a token may be in several lists or in none."""

import torch
from torch import Tensor

from ..softmax import dense


def members(scores: Tensor, w: int) -> Tensor:
    """The w tokens of the largest score, by position: scores (B,H,K,N) -> (B,H,K,min(w,N)) int64."""
    return scores.topk(min(w, scores.shape[-1]), dim=-1).indices.sort(-1).values


def attend(q: Tensor, k: Tensor, v: Tensor, asks: Tensor, keys: Tensor, *, causal: bool) -> Tensor:
    """Each list's queries see its keys; a token reads the mean of its lists, and 0 where it is in none.

    q, k (B,H,N,D), v (B,H,N,E), lists of queries and of keys (B,H,K,w) int64 by position -> (B,H,N,E). ``causal``, with
    the same lists of both: the keys before a query's own position in its list, and its own where there is none.

    Source: Roy et al. 2020 (2003.05997), section 4.1 and algorithm 1. O(K w^2 D) time, O(K w (w + D)) memory.
    """
    heads, n, width = q.shape[1], q.shape[2], v.shape[-1]
    rows = (_take(x, at).flatten(0, 1) for x, at in ((q, asks), (k, keys), (v, keys)))  # (BH,K,w,.)
    allowed = inside(asks.shape[-1], q.device)[None, None] if causal else None
    o = dense.attend(*rows, mask=allowed).unflatten(0, (-1, heads))
    at = asks.flatten(2)
    total = o.new_zeros(*q.shape[:3], width).scatter_add(2, at[..., None].expand(-1, -1, -1, width), o.flatten(2, 3))
    lists = torch.zeros_like(q[..., 0], dtype=torch.int64).scatter_add(2, at, torch.ones_like(at))
    assert lists.shape[2] == n
    return total / lists.clamp(min=1)[..., None].to(total.dtype)


def inside(w: int, device: torch.device) -> Tensor:
    """Who sees whom in a causal list of w tokens, bool (w,w): those before, and the first one itself."""
    seen = torch.ones(w, w, dtype=torch.bool, device=device).tril(-1)
    return seen | (torch.arange(w, device=device) == 0).logical_and(torch.arange(w, device=device)[:, None] == 0)


def matrix(q: Tensor, k: Tensor, asks: Tensor, keys: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The definition, cluster by cluster: weights (B,H,N,N) that ``attend`` gives to values, and which pairs it sees.

    q, k (B,H,N,D), lists (B,H,K,w).
    """
    logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    total, seen = torch.zeros_like(logits), torch.zeros_like(logits, dtype=torch.bool)
    lists = torch.zeros_like(logits[..., :1])
    at = torch.arange(q.shape[2], device=q.device)
    for ask, key in zip(asks.unbind(2), keys.unbind(2), strict=True):
        rows, columns = (torch.zeros_like(logits[..., 0], dtype=torch.bool).scatter(2, x, True) for x in (ask, key))
        allowed = rows[..., :, None] & columns[..., None, :]
        if causal:
            before = allowed & (at[:, None] > at)
            allowed = before | (allowed & (at[:, None] == at) & ~before.any(-1, keepdim=True))
        p = logits.masked_fill(~allowed, -torch.inf)
        blind = ~allowed.any(-1, keepdim=True)
        total = total + p.masked_fill(blind, 0.0).softmax(-1).masked_fill(~allowed, 0.0)
        seen, lists = seen | allowed, lists + rows[..., None]
    return total / lists.clamp(min=1), seen


def _take(x: Tensor, at: Tensor) -> Tensor:
    """Rows of x (B,H,N,D) in lists at (B,H,K,w) -> (B,H,K,w,D)."""
    index = at.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index).unflatten(2, at.shape[2:])
