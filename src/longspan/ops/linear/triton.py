"""Linear attention in Triton: causal and bidirectional sequences, forward and backward, and one token."""

from typing import Any

from torch import Tensor

from .. import triton


def why_not(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, mask: Tensor | None, segments: Tensor | None, *, causal: bool
) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    return triton.why_not(q, k, v, state, mask, segments) or "they are not written yet"


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, state: Tensor | None, causal: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError
