"""Softmax over the pairs that rounds show, all pairs at once: what the tiles compute, for proofs and derivatives."""

from typing import cast

import torch
from torch import Tensor


def weighted(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q (B,H,N,D), k (B,H,P,M,D), v (B,H,P,M,E), seen (B,H,R,N,M) bool, each pair in one round at most -> output
    (B,H,N,E), weights (B,H,R,N,M), log of each row's sum (B,H,N); a row that sees nothing gives 0 and -inf.
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
