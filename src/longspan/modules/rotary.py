"""Rotary positions."""

import torch
from torch import Tensor

from .._utils.spec import known


def rotate(x: Tensor, at: Tensor, base: float, layout: str = "halves") -> Tensor:
    """Rotate pair j of the D channels by position * base^(-2j/D).

    Args:
        x: (B,H,N,D) queries or keys.
        at: (B,N) positions.
        base: Base of the angles, which are computed in float32 or better.
        layout: ``halves``: channel j is paired with j + D/2. ``interleaved``: 2j with 2j + 1. Weights for one layout
            need their rows permuted for the other.

    Returns:
        (B,H,N,D).

    References:
        Su et al. 2021 (2104.09864), eq. 34.
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
    """Raise ValueError unless heads of ``dim`` channels can be rotated with this base and layout."""
    known(layout, {"halves": 0, "interleaved": 0}, "rotary_layout")
    if not base and layout != "halves":
        raise ValueError(
            f"rotary_layout={layout!r} has no effect with rotary=0.0; pass the base of the angles, e.g. rotary=10000.0"
        )
    if base < 0:
        raise ValueError(f"rotary={base} must be positive (the base of the angles), or 0 for no rotary positions")
    if base and dim % 2:
        raise ValueError(f"rotary positions need an even head dimension, not {dim}")
