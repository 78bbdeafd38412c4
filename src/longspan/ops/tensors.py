"""Tensor helpers of the ops: dtypes, splitting and merging heads, positions, visibility within a call."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .shards import active_shards


def upcast_half(x: Tensor) -> Tensor:
    """Convert half precision to float32; float32 and float64 stay as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x: float32 for half precision, else that of x."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def per_root(dim: int) -> float:
    """Return 1 / sqrt(D), the default scale of products of D channels; 1 for D = 0."""
    return float(max(dim, 1) ** -0.5)


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(|x|^2 + eps): (..., D) -> (..., D) in x's dtype, summed in float32 at least."""
    wide = upcast_half(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps): (..., D) -> (..., D), in x's dtype throughout."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x). A compiler assumes a layout for the gradient of ``F.softplus`` that transposed ones lack."""
    return torch.logaddexp(x, x.new_zeros(()))


def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones, whose weighted sum is the normalizer: (..., E) -> (..., E+1)."""
    return F.pad(v, (0, 1), value=1.0)


def split(x: Tensor, heads: int) -> Tensor:
    """(B,N,H*D) -> (B,H,N,D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B,H,N,D) -> (B,N,H*D)."""
    return x.transpose(1, 2).flatten(-2)


def positions(
    x: Tensor, start: Tensor | None = None, *, mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the position of each token: the number of real tokens before it in its segment.

    Args:
        x: (B,N,...), for its sizes and device.
        start: (B,) int64, the real tokens of earlier calls; None for 0.
        mask: (B,N) bool, True = a real token.
        segments: (B,N) int64, packed sequences.

    Returns:
        The positions (B,N) int64, and the next position (B,). Positions of masked tokens are arbitrary, but never
        negative.
    """
    batch, n = x.shape[:2]
    if (shards := active_shards()) is not None:
        start = shards.position(start, x)
    if start is None:
        start = torch.zeros(batch, dtype=torch.long, device=x.device)
    if mask is None and segments is None:
        return start[:, None] + torch.arange(n, device=x.device), start + n
    real = torch.ones(batch, n, dtype=torch.long, device=x.device) if mask is None else mask.long()
    count = real.cumsum(1)
    before = count - real
    if segments is None:
        return start[:, None] + before, start + real.sum(1)
    border = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    base = torch.where(border, before, 0).cummax(1).values
    at = before - base + torch.where(segments == segments[:, :1], start[:, None], 0)
    return at, at[:, -1] + real[:, -1] if n else start.clone()


def visible(x: Tensor, *, causal: bool, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
    """Return which tokens of a call see each other: x (B,N,...), mask (B,N), segments (B,N) -> bool (B|1,1,N,N)."""
    n = x.shape[1]
    allowed = torch.ones(1, 1, n, n, dtype=torch.bool, device=x.device)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    return allowed
