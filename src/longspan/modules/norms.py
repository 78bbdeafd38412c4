"""Normalization layers: LayerNorm, RMSNorm, and a norm for each head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.spec import head, known, parse
from ..ops.tensors import rms_normalize, upcast_half


def norm(text: str, dim: int) -> nn.Module:
    """Return a ``layer`` (Ba et al. 2016) or ``rms`` (Zhang and Sennrich 2019) norm over the last axis.

    Args:
        text: ``layer`` or ``rms``, with the number that is added to the mean square: ``rms(eps=1e-05)``.
        dim: Channels.

    Raises:
        ValueError: For another kind or option, and an eps that is not positive.
    """

    kind, eps = parsed(text)
    return kind(dim, eps=eps)


def parsed(text: str) -> tuple[type[nn.LayerNorm | nn.RMSNorm], float]:
    """Return the class of a norm and its eps; errors as ``norm``."""

    def layer(*, eps: float = 1e-5) -> tuple[type[nn.LayerNorm], float]:
        return nn.LayerNorm, eps

    def rms(*, eps: float = 1e-6) -> tuple[type[nn.RMSNorm], float]:
        return nn.RMSNorm, eps

    known(head(text) or text, {"layer": layer, "rms": rms}, "norm")
    kind, eps = parse(text, {"layer": layer, "rms": rms})
    if not eps > 0:
        raise ValueError(f"eps={eps} of a norm must be positive")
    return kind, eps


class HeadNorm(nn.Module):
    """Normalizes the output of each head, and multiplies it by an optional gate.

    Args:
        size: Channels of a head.
        kind: ``rms``: x / sqrt(mean(x^2) + eps) * weight, with one weight (E,) for all heads. ``group``: the same after
            subtracting the mean over the head's channels, without weights.
        gate: Activation of the gate: ``silu``, ``sigmoid`` or ``none``.
        eps: Added to the mean square.

    Raises:
        ValueError: For an unknown kind or gate.

    References:
        Sun et al. 2023 (2307.08621), eq. 8, for group and silu; Yang et al. 2023 (2312.06635), section 4.4, for rms and
        silu; Kimi Team 2025 (2510.26692) for rms and sigmoid.
    """

    def __init__(self, size: int, *, kind: str = "rms", gate: str = "none", eps: float = 1e-5):
        super().__init__()
        self.kind, self.eps = known(kind, {"rms": 0, "group": 0}, "head norm"), eps
        self.gate = known(gate, {"none": 0, "silu": 0, "sigmoid": 0}, "gate of a head norm")
        self.weight = nn.Parameter(torch.ones(size)) if kind == "rms" else None

    def reset_parameters(self) -> None:
        """Set the weights to 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x (B,H,N,E), gate (B,H,N,E) or None -> (B,H,N,E) in the dtype of x."""
        wide = upcast_half(x)
        if self.kind == "group":
            wide = wide - wide.mean(-1, keepdim=True)
        y = rms_normalize(wide, self.eps)
        if self.weight is not None:
            y = y * self.weight.to(y.dtype)
        match self.gate, gate:
            case "none", None:
                return y.to(x.dtype)
            case "silu", Tensor():
                return (y * F.silu(gate.to(y.dtype))).to(x.dtype)
            case "sigmoid", Tensor():
                return (y * gate.to(y.dtype).sigmoid()).to(x.dtype)
        raise AssertionError(f"gate must not be {type(gate).__name__} in a head norm with gate={self.gate!r}")


def expanded(size: int, by: float, name: str) -> int:
    """Return ``by`` times ``size`` channels. Raises ValueError with the option's ``name`` if that is not whole."""
    width = round(size * by)
    if width < 1 or width != size * by:
        raise ValueError(f"{name}={by} times a head dimension of {size} is not a whole number of channels")
    return width
