"""Attention from scores that are written out, for mechanisms that change them before or after the softmax."""

import torch
from torch import Tensor

from ..backends import select_backend
from ..tensors import upcast_half


def products(q: Tensor, k: Tensor) -> Tensor:
    """q k^T / sqrt(D): q (B,H,N,D), k (B,H,M,D) -> (B,H,N,M), float32 at least, also under autocast."""
    with torch.autocast(q.device.type, enabled=False):
        return upcast_half(q) @ upcast_half(k).mT * q.shape[-1] ** -0.5


def weights(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; a query that sees none gets zeros.

    scores (B,H,N,M), allowed bool broadcast to it -> (B,H,N,M). O(N M) memory: this is the definition itself, so
    there is one form only.
    """
    select_backend("attention from written-out scores")
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) * allowed


def key_positions(at: Tensor, keys: int, *, kept: bool, packed: bool) -> Tensor:
    """Positions of the keys that a call sees, laid out as the cache of keys and values does.

    at (B,N): positions of the call's own tokens -> (B,keys); those of keys that no query may see mean nothing. Without
    a state (``kept``) the keys are the tokens; with one, slots are positions; in a ``packed`` call with a state, the
    tokens come after its slots.
    """
    if not kept:
        return at
    slots = torch.arange(keys - at.shape[1] if packed else keys, device=at.device).expand(len(at), -1)
    return torch.cat([slots, at], 1) if packed else slots
