"""Softmax attention to the keys with the largest scores."""

import torch
from torch import Tensor

from ..backends import select_backend
from ..softmax import scores
from . import blocks


def largest(logits: Tensor, allowed: Tensor, keys: int) -> Tensor:
    """Select the ``keys`` largest logits of each row among the allowed keys.

    Among equal logits the first keys win. Rows with fewer allowed keys keep all of them.

    Args:
        logits: (B,H,N,M) scores.
        allowed: bool, broadcast to (B,H,N,M).
        keys: Number of keys to keep in each row.

    Returns:
        A bool tensor (B,H,N,M).
    """
    if keys >= logits.shape[-1]:
        return allowed.expand_as(logits)
    logits = logits.masked_fill(~allowed, -torch.inf)
    least = logits.topk(keys, -1).values[..., -1:]
    above, equal = logits > least, logits == least
    # Fill the remaining places with keys of the smallest kept score, in order: no later key can displace one.
    room = keys - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & allowed


def weights(q: Tensor, k: Tensor, allowed: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention matrix over the selected keys, in O(N M) memory; the selection has no gradient.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,M,D) keys.
        allowed: bool, broadcast to (B,H,N,M).
        keys: Number of keys to keep in each row.

    Returns:
        The attention matrix and the mask of selected keys, (B,H,N,M) each, and the log-sum-exp of each row (B,H,N).
    """
    logits = scores.products(q, k)
    mask = largest(logits.detach(), allowed, keys)
    return scores.weights(logits, mask), mask, logits.masked_fill(~mask, -torch.inf).logsumexp(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: blocks.Allowed, keys: int) -> Tensor:
    """Attend from each query to the ``keys`` keys with the largest scores, in O(N M D) time.

    Scores are computed for one block of queries at a time and recomputed in the backward pass. So memory is that of one
    block and the operands.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,M,D) keys.
        v: (B,H,M,E) values.
        allowed: ``allowed(start, stop)`` returns the mask of these queries.
        keys: Number of keys that each query keeps.

    Returns:
        The output (B,H,N,E), 0 for a query that sees no key.

    References:
        Gupta et al. 2021 (2106.06899), section 2, for the blocks.
    """

    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        p = weights(q, k, mask, keys)[0]
        with torch.autocast(v.device.type, enabled=False):
            return (p @ v.to(p.dtype)).to(v.dtype)

    if select_backend("attention to the largest scores") == "reference":
        return form(q, k, v, allowed(0, q.shape[2]))
    return blocks.each(form, q, k, v, allowed)
