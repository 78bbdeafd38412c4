"""Attention one block of queries at a time, in the torch form of ops whose kernels hold no matrix either."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..operands import transformed

MAX_SCORES = 2**22  # scores in memory at a time


def by_blocks(form: Callable[..., Tensor], q: Tensor, at: Tensor, *given: Tensor, size: int = 0) -> Tensor:
    """Compute ``form(q, at, *given)`` for blocks of queries, each computed again in the backward pass.

    Args:
        form: The attention of some queries to all keys.
        q: (B,H,N,D) queries.
        at: (B,N) int64, their positions.
        given: Other tensors; the first is (B,G,M,D), the keys.
        size: Queries of a block; 0: about ``MAX_SCORES`` scores.

    Returns:
        The output (B,H,N,E).
    """
    n = q.shape[2]
    size = size or max(MAX_SCORES // max(q.shape[0] * q.shape[1] * given[0].shape[2], 1), 16)
    again = torch.is_grad_enabled() and not transformed() and not torch.compiler.is_compiling() and n > size
    outs = []
    for start in range(0, n, size) or [0]:
        part = q[:, :, start : start + size], at[:, start : start + size], *given
        outs.append(checkpoint(form, *part, use_reentrant=False) if again else form(*part))
    return torch.cat(outs, 2)
