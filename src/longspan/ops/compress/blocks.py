"""Queries in blocks, whose scores are computed again in the backward: O(N x block) memory for any rule of selection."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..operands import transformed

NUMBERS = 2**22  # scores that are held at once

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Allowed = Callable[[int, int], Tensor]


def each(form: Form, q: Tensor, k: Tensor, v: Tensor, allowed: Allowed) -> Tensor:
    """``form(q, k, v, mask)`` block by block: q (B,H,N,D), k (B,H,M,D), v (B,H,M,E) -> (B,H,N,E).

    ``allowed(start, stop)`` is the mask of these queries, bool, broadcast to (B,H,stop-start,M), or of fewer keys where
    they see none of the last ones.
    """
    batch, heads, n, _ = q.shape
    size = max(NUMBERS // max(batch * heads * k.shape[2], 1), 16)
    again = torch.is_grad_enabled() and not transformed() and not torch.compiler.is_compiling() and n > size

    def block(start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = allowed(start, start + q.shape[2])
        return form(q, k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]], mask)

    outs = []
    for start in range(0, n, size) or [0]:
        part = q[:, :, start : start + size]
        if again:
            outs.append(checkpoint(block, start, part, k, v, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(block(start, part, k, v))
    return torch.cat(outs, 2)
