"""Attention under a pattern by its definition, over all pairs at once: for tests and higher derivatives."""

import torch
from torch import Tensor

from ...patterns import Pattern
from ..softmax.dense import repeat
from .tiles import capped


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, layer: int, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``blockwise.attend`` in O(N M): output (B,H,N,E), weights (B,H,N,M), log-sum-exp of rows (B,H,N)."""
    n, m = q.shape[2], k.shape[2]
    allowed = pattern.dense(m, heads=q.shape[1], layer=layer, device=q.device)[..., m - n :, :]
    k, v = repeat(k, q.shape[1]), repeat(v, q.shape[1])
    return weighted(scores(q, k, scale, softcap), v, allowed)


def scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute the logits (B,H,N,M), in float32 or float64."""
    return capped((q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale, softcap)


def weighted(logits: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output, weights and log-sum-exp of rows; a row that sees no key gets 0, 0 and -inf."""
    logits = logits.masked_fill(~allowed, -torch.inf)
    lse = logits.logsumexp(-1)
    # In a row without keys, all weights and all gradients are 0.
    blind = (lse == -torch.inf)[..., None]
    p = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(~allowed, 0.0)
    # Weights of 0 are not enough: 0 times NaN is NaN.
    return (p.to(v.dtype) @ v).masked_fill(blind, 0.0), p, lse
