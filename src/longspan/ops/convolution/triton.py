"""The causal convolution in Triton: sequences, forward and backward, and one token."""

from typing import Any

from torch import Tensor

from .. import triton


def why_not(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    return triton.unreadable(x, weight, bias, state, segments, cu_seqlens) or "they are not written yet"


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    raise NotImplementedError
