"""Parts that several mechanisms and models share: positions, normalisation, the feed-forward network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def positions(
    x: Tensor, start: Tensor | None = None, *, mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Position of each token: the number of real tokens before it in its own segment.

    x (B,N,...), start (B,) = real tokens seen in earlier calls, mask (B,N) bool, segments (B,N) int64
    -> positions (B,N) int64 (those of masked tokens mean nothing, and are never negative), next position (B,).
    """
    batch, n = x.shape[:2]
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
    return at, at[:, -1] + real[:, -1] if n else start


def visible(x: Tensor, *, causal: bool, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
    """Which token of one call may see which: x (B,N,...), mask (B,N), segments (B,N) -> bool (B|1,1,N,N)."""
    n = x.shape[1]
    allowed = torch.ones(1, 1, n, n, dtype=torch.bool, device=x.device)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    return allowed


def rotate(x: Tensor, at: Tensor, base: float) -> Tensor:
    """Rotary positions: pair j of the D channels turns by position * base^(-2j/D).

    x (B,H,N,D), at (B,N) -> (B,H,N,D). Channel j is paired with channel j + D/2 (the "half-split" layout; weights made
    for the interleaved layout need their rows permuted). Angles are float32 at least.

    Source: Su et al. 2021 (2104.09864), eq. 34.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates = base ** (torch.arange(half, device=x.device, dtype=dtype) / -half)
    angles = at[:, None, :, None].to(dtype) * rates  # (B,1,N,D/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def check_rotary(base: float, dim: int) -> None:
    """Raise ValueError where heads of ``dim`` channels cannot be rotated with this base."""
    if base < 0:
        raise ValueError(f"rotary={base} is the base of the angles; it must be positive, or 0 for none")
    if base and dim % 2:
        raise ValueError(f"rotary positions turn pairs of channels, so heads need an even size, not {dim}")


def sinusoid(at: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """at (B,N) -> (B,N,dim): channels 2j and 2j+1 are sin and cos of position * 10000^(-2j/dim).

    Source: Vaswani et al. 2017 (1706.03762), section 3.5, counted from zero.
    """
    wide = torch.promote_types(dtype, torch.float32)
    pairs = (dim + 1) // 2
    rates = 10000.0 ** (torch.arange(pairs, device=at.device, dtype=wide) * (-2 / dim))
    angles = at[..., None].to(wide) * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :dim].to(dtype)


def norm(kind: str, dim: int) -> nn.Module:
    """``layer`` (Ba et al. 2016) or ``rms`` (Zhang and Sennrich 2019) normalisation over the last axis."""
    return nn.LayerNorm(dim) if kind == "layer" else nn.RMSNorm(dim, eps=1e-6)


class FeedForward(nn.Module):
    """W2 act(W1 x), or with a gate W2 (act(W1 x) * W3 x): (B,N,dim) -> (B,N,dim).

    Source: Vaswani et al. 2017, eq. 2; Shazeer 2020 (2002.05202) for geglu and swiglu.
    """

    def __init__(self, dim: int, inner: int, activation: str):
        super().__init__()
        self.activation = activation
        self.gated = activation in ("geglu", "swiglu")
        self.expand = nn.Linear(dim, 2 * inner if self.gated else inner)
        self.contract = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        if self.gated:
            hidden, gate = hidden.chunk(2, -1)
            return self.contract((F.gelu(hidden) if self.activation == "geglu" else F.silu(hidden)) * gate)
        match self.activation:
            case "squared_relu":
                return self.contract(F.relu(hidden).square())
            case name:
                return self.contract(getattr(F, name)(hidden))
