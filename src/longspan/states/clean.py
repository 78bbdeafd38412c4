"""Calls with padding and packed sequences, for mechanisms that are written for rows of real tokens alone."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops import sparse
from ..ops.operands import transformed
from .rows import Run, apart, in_front


def each(
    run: Run, x: Tensor, state: Any, mask: Tensor | None, segments: Tensor | None, *, causal: bool, width: int
) -> tuple[Tensor, Any]:
    """``run(x, state, real)`` for every sequence: x (B,N,.), mask, segments (B,N) -> outputs (B,N,width), the state.

    Without a state, sequences of the same length (``causal``: of about the same) share a call with ``real`` None, so
    that memory is that of their tokens. With one, and where a graph is traced, rows begin with their real tokens, which
    ``real`` (B,N) tells from the others; the outputs of those are 0 in either case.
    """
    if not x.numel() or (mask is None and segments is None):
        return run(x, state, None)
    if state is not None or torch.compiler.is_compiling() or transformed():
        return apart(partial(in_front, run), x, state, mask, segments)

    def clean(x: Tensor, _: Tensor, __: Tensor) -> Tensor:
        return run(x[:, 0], None, None)[0][:, None]

    one = x[:, None]
    y = sparse.ragged(one, one[..., :0], one[..., :width], clean, mask, segments, exact=not causal)[:, 0]
    # A batch of padding alone has a gradient too, of zeros.
    return y + 0 * x[..., :width], None
