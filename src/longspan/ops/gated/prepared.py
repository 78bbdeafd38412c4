"""Normalization and ``cu_seqlens`` for the forms in torch; the kernels do both inside."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..operands import zero_masked
from ..tensors import unit, upcast_half

NORMS = {"l2": "divide by the root of the sum of squares plus 1e-6"}


def prepared(
    form: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    normalize: bool,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call ``form`` on operands as in ``gated.recur``; ``form`` handles neither ``normalize`` nor cu_seqlens."""
    if normalize:
        # Masked tokens are zeroed before the root. In float32 at least, as in the kernels.
        q, k = (unit(upcast_half(t)) for t in zero_masked(mask, q, k))
    if cu_seqlens is None:
        return form(q, k, v, log_decay=log_decay, beta=beta, state=state, mask=mask, segments=segments, **options)
    out, ends = [v[:, :, :0]], [state[:0]]
    for s, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        one = state[s : s + 1]
        if begin < end:
            tokens = (t[:, :, begin:end] for t in (q, k, v))
            gates = {
                name: t if t is None else t[:, :, begin:end] for name, t in (("log_decay", log_decay), ("beta", beta))
            }
            here = None if mask is None else mask[:, begin:end]
            o, one = form(*tokens, **gates, state=one, mask=here, segments=None, **options)
            out.append(o)
        ends.append(one)
    return torch.cat(out, 2), torch.cat(ends)
