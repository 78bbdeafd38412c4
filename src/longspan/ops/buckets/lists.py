"""Softmax attention within lists of tokens; a token may be in several lists or in none."""

import torch
from torch import Tensor

from ..softmax import dense


def members(scores: Tensor, w: int) -> Tensor:
    """Select the w tokens with the largest scores, in order: scores (B,H,K,N) -> (B,H,K,min(w,N)) int64."""
    return scores.topk(min(w, scores.shape[-1]), dim=-1).indices.sort(-1).values


def attend(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, *, causal: bool) -> Tensor:
    """Attend from the queries of each list to its keys, in O(K w^2 D) time and O(K w (w + D)) memory.

    A token in several lists gets the mean of its outputs.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,N,D) keys.
        v: (B,H,N,E) values.
        queries: (B,H,K,w) int64, the tokens of each list of queries, in order.
        keys: (B,H,K,w) int64, the tokens of each list of keys, in order; equal to ``queries`` if causal.
        causal: A query sees the keys before it in its list, or only its own if it is the first.

    Returns:
        The output (B,H,N,E), 0 for a token in no list.

    References:
        Roy et al. 2020 (2003.05997), section 4.1 and algorithm 1.
    """
    heads, n, width = q.shape[1], q.shape[2], v.shape[-1]
    rows = (_take(x, at).flatten(0, 1) for x, at in ((q, queries), (k, keys), (v, keys)))  # (BH,K,w,.)
    allowed = inside(queries.shape[-1], q.device)[None, None] if causal else None
    o = dense.attend(*rows, mask=allowed).unflatten(0, (-1, heads))
    at = queries.flatten(2)
    total = o.new_zeros(*q.shape[:3], width).scatter_add(2, at[..., None].expand(-1, -1, -1, width), o.flatten(2, 3))
    lists = torch.zeros_like(q[..., 0], dtype=torch.int64).scatter_add(2, at, torch.ones_like(at))
    assert lists.shape[2] == n
    return total / lists.clamp(min=1)[..., None].to(total.dtype)


def inside(w: int, device: torch.device) -> Tensor:
    """Return the mask of a causal list of w tokens, bool (w,w): earlier tokens, and for the first one itself."""
    seen = torch.ones(w, w, dtype=torch.bool, device=device).tril(-1)
    return seen | (torch.arange(w, device=device) == 0).logical_and(torch.arange(w, device=device)[:, None] == 0)


def matrix(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the matrix (B,H,N,N) of ``attend`` by its definition, one list at a time, and the mask of its pairs."""
    logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    total, seen = torch.zeros_like(logits), torch.zeros_like(logits, dtype=torch.bool)
    lists = torch.zeros_like(logits[..., :1])
    at = torch.arange(q.shape[2], device=q.device)
    for query, key in zip(queries.unbind(2), keys.unbind(2), strict=True):
        rows, columns = (torch.zeros_like(logits[..., 0], dtype=torch.bool).scatter(2, x, True) for x in (query, key))
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
    """Gather rows of x (B,H,N,D) at (B,H,K,w) -> (B,H,K,w,D)."""
    index = at.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index).unflatten(2, at.shape[2:])
