"""Normalization layers: LayerNorm, RMSNorm, and a norm for each head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.spec import known
from ..ops.tensors import upcast_half


def norm(kind: str, dim: int) -> nn.Module:
    """``layer`` (Ba et al. 2016) or ``rms`` (Zhang and Sennrich 2019) normalisation over the last axis."""
    return nn.LayerNorm(dim) if kind == "layer" else nn.RMSNorm(dim, eps=1e-6)


class HeadNorm(nn.Module):
    """Brings each head's output to unit scale, where no normaliser divides it, and lets a gate through what matters.

    ``kind``: rms, x / sqrt(mean(x^2) + eps) * weight, with one weight (E,) for all heads; group, the same after the
    mean of the head's channels has been taken away, and without weights (a GroupNorm whose groups are the heads of one
    token). ``gate``: the norm's output is multiplied by silu or sigmoid of a gate, or by nothing (none).

    Source: group and silu, Sun et al. 2023 (2307.08621), eq. 8; rms and silu, Yang et al. 2023 (2312.06635), section
    4.4; rms and sigmoid, Kimi Team 2025 (2510.26692). Raises ValueError for an unknown kind or gate.
    """

    def __init__(self, size: int, *, kind: str = "rms", gate: str = "none", eps: float = 1e-5):
        super().__init__()
        self.kind, self.eps = known(kind, {"rms": 0, "group": 0}, "head norm"), eps
        self.gate = known(gate, {"none": 0, "silu": 0, "sigmoid": 0}, "gate of a head norm")
        self.weight = nn.Parameter(torch.ones(size)) if kind == "rms" else None

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x (B,H,N,E), gate of the same shape unless there is none -> (B,H,N,E) in x's dtype."""
        wide = upcast_half(x)
        if self.kind == "group":
            wide = wide - wide.mean(-1, keepdim=True)
        y = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if self.weight is not None:
            y = y * self.weight.to(y.dtype)
        match self.gate, gate:
            case "none", None:
                return y.to(x.dtype)
            case "silu", Tensor():
                return (y * F.silu(gate.to(y.dtype))).to(x.dtype)
            case "sigmoid", Tensor():
                return (y * gate.to(y.dtype).sigmoid()).to(x.dtype)
        raise AssertionError(f"a head norm with gate {self.gate!r} got {type(gate).__name__} as its gate")


def expanded(size: int, by: float, name: str) -> int:
    """Channels of a head that is ``by`` times as wide as ``size``. Raises ValueError, with the option's ``name``."""
    width = round(size * by)
    if width < 1 or width != size * by:
        raise ValueError(f"{name}={by} times heads of {size} channels is no whole number of channels")
    return width
