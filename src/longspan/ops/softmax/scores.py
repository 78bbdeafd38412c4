"""Attention from explicit scores, for mechanisms that change them before or after the softmax."""

import torch
from torch import Tensor

from ..backends import select_backend
from ..tensors import upcast_half


def products(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T / sqrt(D): q (B,H,N,D), k (B,H,M,D) -> (B,H,N,M), float32 at least, also under autocast."""
    with torch.autocast(q.device.type, enabled=False):
        return upcast_half(q) @ upcast_half(k).mT * q.shape[-1] ** -0.5


def weights(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; zeros for a query without any.

    scores (B,H,N,M), allowed bool broadcast to it -> (B,H,N,M). O(N M) memory: the definition, which is the only form.
    """
    select_backend("attention from written-out scores")
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) * allowed


def key_positions(at: Tensor, keys: int, *, kept: bool, packed: bool) -> Tensor:
    """Return the positions of the keys of a call, in the layout of the KV cache.

    Args:
        at: (B,N), positions of the tokens of the call.
        keys: The number of keys.
        kept: Whether there is a state. Without one the keys are the tokens; with one, slots are positions.
        packed: Whether the tokens of the call come after the slots of the state.

    Returns:
        (B,keys); arbitrary for keys that no query sees.
    """
    if not kept:
        return at
    slots = torch.arange(keys - at.shape[1] if packed else keys, device=at.device).expand(len(at), -1)
    return torch.cat([slots, at], 1) if packed else slots
