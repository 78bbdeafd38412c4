"""Softmax over the pairs of a pattern, all pairs at once: what the blocks compute, for proofs and derivatives."""

import torch
from torch import Tensor

from ...patterns import Pattern
from ..softmax.dense import repeat
from .tiles import capped


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, layer: int, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``blockwise.attend`` in O(N M): -> output (B,H,N,E), weights (B,H,N,M), log of each row's sum (B,H,N)."""
    n, m = q.shape[2], k.shape[2]
    allowed = pattern.dense(m, heads=q.shape[1], layer=layer, device=q.device)[..., m - n :, :]
    k, v = repeat(k, q.shape[1]), repeat(v, q.shape[1])
    return weighted(scores(q, k, scale, softcap), v, allowed)


def scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """The logits (B,H,N,M), float32 at least."""
    return capped((q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale, softcap)


def weighted(logits: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> output, weights, log of each row's sum; a row that sees nothing gives 0 and -inf."""
    logits = logits.masked_fill(~allowed, -torch.inf)
    lse = logits.logsumexp(-1)
    # A row without keys: every weight is 0, and so is every gradient.
    blind = (lse == -torch.inf)[..., None]
    p = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(~allowed, 0.0)
    # Not by the weights alone: 0 times NaN is NaN.
    return (p.to(v.dtype) @ v).masked_fill(blind, 0.0), p, lse
