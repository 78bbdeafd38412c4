"""Rotary positions."""

import torch
from torch import Tensor

from .._utils.spec import known


def rotate(x: Tensor, at: Tensor, base: float, layout: str = "halves") -> Tensor:
    """Rotary positions: pair j of the D channels turns by position * base^(-2j/D).

    x (B,H,N,D), at (B,N) -> (B,H,N,D). ``layout``: halves, channel j is paired with j + D/2; interleaved, 2j with
    2j + 1. Weights made for one need their rows permuted for the other. Angles are float32 at least.

    Source: Su et al. 2021 (2104.09864), eq. 34.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates = base ** (torch.arange(half, device=x.device, dtype=dtype) / -half)
    angles = at[:, None, :, None].to(dtype) * rates  # (B,1,N,D/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if layout == "interleaved":
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def check_rotary(base: float, layout: str, dim: int) -> None:
    """Raise ValueError where heads of ``dim`` channels cannot be rotated with this base and layout."""
    known(layout, {"halves": 0, "interleaved": 0}, "rotary_layout")
    if not base and layout != "halves":
        raise ValueError(f"rotary_layout={layout!r} says which channels turn, and with rotary=0.0 none do")
    if base < 0:
        raise ValueError(f"rotary={base} is the base of the angles; it must be positive, or 0 for none")
    if base and dim % 2:
        raise ValueError(f"rotary positions turn pairs of channels, so heads need an even size, not {dim}")
