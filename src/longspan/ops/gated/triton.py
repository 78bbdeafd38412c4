"""Decay attention and the delta rule in Triton: sequences, forward and backward, and one token."""

from typing import Any

from torch import Tensor

from .. import triton


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
    return triton.why_not(q, k, v, state, log_decay, beta, mask, segments, cu_seqlens) or "they are not written yet"


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    raise NotImplementedError
