"""``cu_seqlens`` for the forms in torch; the kernels handle them inside."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def apart(
    form: Callable[..., tuple[Tensor, Tensor]],
    tokens: Sequence[Tensor | None],
    fixed: Sequence[Tensor | None],
    state: Tensor,
    *,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call ``form(tokens, fixed, state)`` on each packed sequence of the one row.

    Args:
        form: Takes tokens, ``fixed`` and a state in two lists and a tensor, and returns y (B,N,channels) and the state.
        tokens: (B,N,...) each or None; the first is like y.
        fixed: Operands that all tokens share.
        state: (S,...), one per sequence.
        cu_seqlens: (S+1,), or None for one call.
        mask: (B,N) bool or None.
        segments: (B,N) or None.
        options: Passed on to ``form``.
    """
    if cu_seqlens is None:
        return form(tokens, fixed, state, mask=mask, segments=segments, **options)
    first = tokens[0]
    assert first is not None
    out, ends = [first[:, :0]], [state[:0]]
    for s, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        one = state[s : s + 1]
        if begin < end:
            here = [None if t is None else t[:, begin:end] for t in tokens]
            real = None if mask is None else mask[:, begin:end]
            y, one = form(here, fixed, one, mask=real, segments=None, **options)
            out.append(y)
        ends.append(one)
    return torch.cat(out, 1), torch.cat(ends)
