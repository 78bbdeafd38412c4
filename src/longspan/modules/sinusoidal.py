"""Sinusoidal positions."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sinusoid(at: Tensor, dim: int, dtype: torch.dtype, *, layout: str = "interleaved", base: float = 10000.0) -> Tensor:
    """Return sines and cosines of position * base^(-2j/dim), j from 0, computed in float32 or better.

    Args:
        at: (B,N) positions.
        dim: Number of channels.
        dtype: The dtype of the result.
        layout: ``interleaved``: sin and cos in channels 2j and 2j + 1. ``halves``: all sines, then all cosines.
            ``tensor2tensor``: halves of floor(dim/2) each, with exponents -j / (floor(dim/2) - 1), and 0 in the last
            channel of an odd dim.
        base: Base of the wavelengths.

    Returns:
        (B,N,dim).

    References:
        Vaswani et al. 2017 (1706.03762), section 3.5, counted from zero; the code of Dai et al. 2019 (1901.02860);
        ``get_timing_signal_1d`` of tensor2tensor.
    """
    wide = torch.promote_types(dtype, torch.float32)
    few = layout == "tensor2tensor"
    pairs = dim // 2 if few else (dim + 1) // 2
    step = -1 / max(pairs - 1, 1) if few else -2 / dim
    rates = base ** (torch.arange(pairs, device=at.device, dtype=wide) * step)
    angles = at[..., None].to(wide) * rates
    if layout == "interleaved":
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :dim].to(dtype)
    return F.pad(torch.cat([angles.sin(), angles.cos()], -1)[..., :dim], (0, few * (dim % 2))).to(dtype)
