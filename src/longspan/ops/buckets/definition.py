"""Attention within buckets by its definition, over all pairs at once: for tests and higher derivatives."""

from typing import cast

import torch
from torch import Tensor


def weighted(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to the pairs of all rounds.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,P,M,D) keys.
        v: (B,H,P,M,E) values.
        seen: (B,H,R,N,M) bool, the pairs of each round; each pair is in at most one round.
        scale: Factor of the logits.

    Returns:
        The output (B,H,N,E), the weights (B,H,R,N,M) and the log-sum-exp of each row (B,H,N). A row that sees no key
        gets 0, 0 and -inf.
    """
    sources, (rounds, m) = k.shape[2], seen.shape[2:5:2]
    logits = torch.stack([(q @ k[:, :, r % sources].mT) for r in range(rounds)], 3)  # (B,H,N,R,M)
    logits = logits.to(torch.promote_types(q.dtype, torch.float32)) * scale
    seen = seen.transpose(2, 3)
    flat = logits.masked_fill(~seen, -torch.inf).flatten(-2)
    lse = flat.logsumexp(-1)
    blind = (lse == -torch.inf)[..., None]
    p = flat.masked_fill(blind, 0.0).softmax(-1).unflatten(-1, (rounds, m)).masked_fill(~seen, 0.0)
    p = p.transpose(2, 3)
    o = sum(p[:, :, r].to(v.dtype) @ v[:, :, r % sources] for r in range(rounds))
    return cast(Tensor, o), p, lse
