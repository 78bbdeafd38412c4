"""Softmax attention to the few keys whose scores are the largest."""

import torch
from torch import Tensor

from ..backends import select_backend
from ..softmax import scores
from . import blocks


def largest(logits: Tensor, allowed: Tensor, keys: int) -> Tensor:
    """Which of the allowed keys have the ``keys`` largest logits, of equal ones the first: logits (B,H,N,M) -> bool.

    Rows with fewer allowed keys keep them all.
    """
    if keys >= logits.shape[-1]:
        return allowed.expand_as(logits)
    logits = logits.masked_fill(~allowed, -torch.inf)
    least = logits.topk(keys, -1).values[..., -1:]
    above, equal = logits > least, logits == least
    # As many of those at the border as there is room for, in their order: no later key can take the place of one.
    room = keys - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & allowed


def weights(q: Tensor, k: Tensor, allowed: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The attention matrix, the mask that it used, both (B,H,N,M), and the log of each row's sum (B,H,N).

    q (B,H,N,D), k (B,H,M,D), allowed bool broadcast to (B,H,N,M). The choice has no gradient. O(N M) memory.
    """
    logits = scores.products(q, k)
    mask = largest(logits.detach(), allowed, keys)
    return scores.weights(logits, mask), mask, logits.masked_fill(~mask, -torch.inf).logsumexp(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: blocks.Allowed, keys: int) -> Tensor:
    """Softmax over the ``keys`` largest scores of each query: q (B,H,N,D), k (B,H,M,D), v (B,H,M,E) -> (B,H,N,E).

    ``allowed(start, stop)`` is the mask of these queries. A query that sees no key gets 0. O(N M D) time; scores are
    those of a block of queries, and computed again in the backward, so that memory is that of a block and the operands.

    Source: Gupta et al. 2021 (2106.06899), section 2, for the blocks.
    """

    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        p = weights(q, k, mask, keys)[0]
        with torch.autocast(v.device.type, enabled=False):
            return (p @ v.to(p.dtype)).to(v.dtype)

    if select_backend("attention to the largest scores") == "reference":
        return form(q, k, v, allowed(0, q.shape[2]))
    return blocks.each(form, q, k, v, allowed)
