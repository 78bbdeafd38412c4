"""The delta rule in Triton, and decay per channel: batched products inside chunks, one kernel from chunk to chunk."""

from functools import partial
from typing import Any

from torch import Tensor

from .. import triton
from . import chunks
from .prepared import prepared


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    if reason := triton.why_not(q, k, v, state, log_decay, beta, mask, segments, cu_seqlens):
        return reason
    if beta is None and (log_decay is None or log_decay.dim() == 3):
        return "they compute the delta rule, or a decay per channel"
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """``gated.recur`` for operands for which ``why_not`` is empty.

    Args:
        q: (B,G,N,D), in float32, bfloat16 or float16.
        k: (B,G,N,D).
        v: (B,H,N,E).
        options: As in ``prepared``: log_decay, beta, state, scale, mask, segments, normalize and cu_seqlens.

    Returns:
        o (B,H,N,E) in v's dtype and the state (B,H,D,E) in float32.
    """
    return prepared(partial(chunks.attend, kernels=True), q, k, v, **options)
