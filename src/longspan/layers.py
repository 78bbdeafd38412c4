"""Parts that several mechanisms and models share: positions, short convolutions, norms, the feed-forward network."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .ops.convolution import convolve
from .ops.operands import in_memory, transformed
from .ops.rows import back, ending, together
from .ops.tensors import widen
from .spec import known


def counted(name: str, counts: Tensor, most: int | None = None) -> tuple[int, int]:
    """The fewest and the most tokens that the rows of a state count, counts (B,) int64; (0, 0) without rows.

    Raises ValueError where that is fewer than none, or more than ``most``.
    """
    low, high = (int(t) for t in counts.aminmax()) if counts.numel() else (0, 0)
    if low < 0 or (most is not None and high > most):
        odd, least = low if low < 0 else high, "at least 0" if most is None else f"0 to {most}"
        raise ValueError(f"the state's {name} is {odd} where it counts tokens, {least}; it is damaged or was changed")
    return low, high


def check_counts(name: str, counts: Tensor, most: int | None = None) -> None:
    """What ``counted`` refuses, where looking costs no waiting: on the CPU, and not while anything traces."""
    if counts.is_cpu and not torch.compiler.is_compiling() and not transformed() and in_memory(counts):
        counted(name, counts, most)


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


def sinusoid(at: Tensor, dim: int, dtype: torch.dtype, *, layout: str = "interleaved", base: float = 10000.0) -> Tensor:
    """at (B,N) -> (B,N,dim): sines and cosines of position * base^(-2j/dim), j from 0, in float32 at least.

    ``layout``: interleaved, sin and cos in channels 2j and 2j + 1; halves, all sines and then all cosines;
    tensor2tensor, halves of floor(dim/2) each, with exponents -j / (floor(dim/2) - 1), and 0 in the last channel of an
    odd dim.

    Source: Vaswani et al. 2017 (1706.03762), section 3.5, counted from zero; the code of Dai et al. 2019 (1901.02860);
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


def linear_numbers(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear map, also of one that torch has quantised, which gives them when called."""
    if isinstance(layer.weight, Tensor):
        return layer.weight, layer.bias
    weight = layer.weight()
    return (weight.dequantize() if weight.is_quantized else weight), layer.bias()


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
        wide = widen(x)
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


def time_steps(*shape: int) -> Tensor:
    """A bias b with softplus(b) log-uniform between 1/1000 and 1/10: decays that remember 10 to 1000 tokens.

    Source: Gu and Dao 2023 (2312.00752), section 3.6.
    """
    steps = 10.0 ** (-3 + 2 * torch.rand(*shape))
    # The inverse of softplus, log(e^s - 1), without a difference of nearly equal numbers.
    return steps + torch.log(-torch.expm1(-steps))


class ShortConvolution(nn.Module):
    """Mixes each channel with its own last few values: depthwise, causal, without a bias of its own.

    y_t = act(bias + sum_j weight[:, j] x_{t-width+1+j}), as ``causal_convolution`` has it; the last column belongs to
    the token itself, as in a causal ``nn.Conv1d``, whose initialisation this is. Sums are float32 at least.

    Source: So et al. 2021 (2109.08668), with width 3; width 4 since Gu and Dao 2023 (2312.00752).
    Raises ValueError for a width that reaches no earlier token.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        if width < 2:
            raise ValueError(f"a convolution of width={width} reaches no earlier token; 2 is the least")
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(channels, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def start(self, batch: int) -> Tensor:
        """The state before the first token: zeros (batch, width-1, channels), float32 at least."""
        return widen(self.weight.new_zeros(batch, self.width - 1, self.channels))

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """x (B,N,channels), state (B,width-1,channels) -> y (B,N,channels) in x's dtype, the next state.

        The state holds the last width-1 real tokens, the oldest first; a given one is left as it was, unless
        ``donate=True`` allows it to be overwritten. mask (B,N) bool: a token that is not real is skipped, and its y
        means nothing. segments (B,N) int64, never decreasing from one real token to the next: a token sees its own
        only, the given state belongs to the first, the returned one to the last. bias (channels,), activation: silu.
        """
        past = self.start(x.shape[0]) if state is None else state
        given = {"activation": activation, "segments": segments}
        if mask is None or not x.shape[1]:
            given["segments"] = segments if x.shape[1] else None
            return convolve(x, self.weight, bias, past, donate=donate, **given)
        # Real tokens side by side, in their order; the others after them, where no real one sees them.
        (x,), earlier = together(mask, x), self.width - 1
        if segments is not None:
            (given["segments"],) = together(mask, segments)
        y, _ = convolve(x, self.weight, bias, past, **given)
        last = ending(torch.cat([past, x.to(past.dtype)], 1), mask, earlier)
        if (ids := given["segments"]) is not None:
            ids = ending(torch.cat([ids[:, :1].expand(-1, earlier), ids], 1), mask, earlier)
            last = last * (ids == ids[:, -1:])[..., None]
        return back(mask, y), last


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

    def forward(self, x: Tensor, *, chunk: int = 0) -> Tensor:
        """``chunk`` tokens at a time (0: all), whose inner activations are made again in the backward."""
        if not chunk or x.shape[1] <= chunk:
            return self._fed(x)
        parts = x.split(chunk, 1)
        if not torch.is_grad_enabled():
            return torch.cat([self._fed(part) for part in parts], 1)
        return torch.cat(
            [checkpoint(self._fed, part, use_reentrant=False, preserve_rng_state=False) for part in parts], 1
        )

    def _fed(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        if self.gated:
            hidden, gate = hidden.chunk(2, -1)
            return self.contract((F.gelu(hidden) if self.activation == "geglu" else F.silu(hidden)) * gate)
        match self.activation:
            case "squared_relu":
                return self.contract(F.relu(hidden).square())
            case name:
                return self.contract(getattr(F, name)(hidden))
