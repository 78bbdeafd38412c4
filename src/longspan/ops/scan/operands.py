"""The operands of the scans, as one value each that every form takes."""

from typing import NamedTuple

from torch import Tensor

from ..arguments import CallOptions, StateOptions
from ..packed import one_token


class Diagonal(NamedTuple):
    """Operands of ``diagonal_scan``."""

    x: Tensor  # (B,N,C)
    log_decay: Tensor  # (B,N,C)
    state: Tensor  # (B,C), a row per sequence with cu_seqlens
    mask: Tensor | None = None  # (B,N)
    segments: Tensor | None = None  # (B,N)
    cu_seqlens: Tensor | None = None  # (S+1,)

    TOKENS = ("x", "log_decay")
    AXIS, OUTPUT, op = 1, "x", "the diagonal scan"
    token = property(one_token)


class SelectiveWeights(StateOptions, total=False):
    """Keyword arguments of ``scan.selective``."""

    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    softplus: bool


class SelectiveOptions(SelectiveWeights, CallOptions, total=False):
    """Keyword arguments of ``selective_scan``."""


class Selective(NamedTuple):
    """Operands of ``selective_scan``, with S states per channel."""

    x: Tensor  # (B,N,channels)
    dt: Tensor  # (B,N,channels)
    A: Tensor | None  # (channels,S)
    B: Tensor  # (B,N,S)
    C: Tensor  # (B,N,S)
    D: Tensor | None  # (channels,)
    z: Tensor | None  # (B,N,channels)
    dt_bias: Tensor | None  # (channels,)
    state: Tensor  # (B,channels,S), a row per sequence with cu_seqlens
    mask: Tensor | None = None  # (B,N)
    segments: Tensor | None = None  # (B,N)
    cu_seqlens: Tensor | None = None  # (S+1,)
    softplus: bool = False  # dt is softplus(dt + dt_bias)

    TOKENS = ("x", "dt", "B", "C", "z")
    AXIS, OUTPUT, op = 1, "x", "the selective scan"
    token = property(one_token)
