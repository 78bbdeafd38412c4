"""Attention one block of queries at a time, with scores recomputed in the backward pass."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..operands import transformed

MAX_SCORES = 2**22  # scores in memory at a time

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Allowed = Callable[[int, int], Tensor]


def each(form: Form, q: Tensor, k: Tensor, v: Tensor, allowed: Allowed) -> Tensor:
    """Compute ``form(q, k, v, mask)`` for one block of queries at a time, with about ``MAX_SCORES`` scores in memory.

    Args:
        form: The attention of one block.
        q: (B,H,N,D) queries.
        k: (B,H,M,D) keys.
        v: (B,H,M,E) values.
        allowed: ``allowed(start, stop)`` returns the bool mask of these queries, broadcast to (B,H,stop-start,M). It
            may leave out trailing keys that none of them sees.

    Returns:
        The output (B,H,N,E).
    """
    batch, heads, n, _ = q.shape
    size = max(MAX_SCORES // max(batch * heads * k.shape[2], 1), 16)
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
