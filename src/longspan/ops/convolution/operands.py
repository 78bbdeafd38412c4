"""The operands of the convolution, as one value that every form takes."""

from typing import NamedTuple

from torch import Tensor

from ..packed import one_token


class Convolution(NamedTuple):
    """Operands of ``causal_convolution``, with C channels and K taps."""

    x: Tensor  # (B,N,C)
    weight: Tensor  # (C,K)
    bias: Tensor | None  # (C,)
    state: Tensor  # (B,R,C), a block of rows per sequence with cu_seqlens
    mask: Tensor | None  # (B,N)
    segments: Tensor | None  # (B,N)
    cu_seqlens: Tensor | None  # (S+1,)
    silu: bool  # the activation

    TOKENS = ("x",)
    AXIS, OUTPUT, op = 1, "x", "the causal convolution"
    token = property(one_token)
