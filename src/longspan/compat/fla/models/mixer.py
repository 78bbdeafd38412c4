"""Recurrent layers of flash-linear-attention: their common interface, and modules with the original's names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....ops.convolution import convolve
from ....ops.tensors import upcast_half


@dataclass
class Call:
    """What all layers of one forward pass share."""

    mask: Tensor | None = None
    """(B,N) bool, True on real tokens"""
    segments: Tensor | None = None
    """(B,N) int64, the sequence of each token in a packed row"""
    donate: bool = False
    """whether states may be overwritten"""
    shared: dict[str, Any] = field(default_factory=dict)
    """values that one layer passes to later ones"""


class Mixer(nn.Module):
    """A layer that mixes tokens: ``y, state = mixer(x, state, call)``.

    ``start`` returns the state before the first token, a NamedTuple of tensors, batch first. Masked tokens change no
    state; their outputs are arbitrary.
    """

    def start(self, batch: int) -> Any:
        """Return the state of ``batch`` rows before the first token."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        """Mix the tokens of x (B,N,hidden) after those of ``state`` -> y (B,N,hidden), the next state."""
        raise NotImplementedError

    @property
    def like(self) -> Tensor:
        """A parameter, for the dtype and device of states."""
        return next(self.parameters())


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 at least; ``affine=False``: no weight."""

    def __init__(self, size: int, eps: float, affine: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None

    def forward(self, x: Tensor, gate: Tensor | None = None, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
        """x (...,size), gate of the same shape or None -> the normalized x, times act(gate)."""
        wide = upcast_half(x)
        y = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if self.weight is not None:
            y = y * self.weight.to(y.dtype)
        if gate is not None:
            y = y * act(gate.to(y.dtype))
        return y.to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ratio: float | None, width: int | None):
        super().__init__()
        if width is None:
            width = 256 * -(-int(hidden * (ratio or 4) * 2 / 3) // 256)
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ShortConv(nn.Module):
    """A causal depthwise convolution with weights (channels,1,taps), as ``nn.Conv1d`` stores them."""

    def __init__(self, channels: int, taps: int, bias: bool = False, activation: str | None = "silu"):
        super().__init__()
        self.channels, self.taps, self.activation = channels, taps, activation
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        nn.init.uniform_(self.weight, -(taps**-0.5), taps**-0.5)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def start(self, batch: int) -> Tensor:
        """Return zeros (batch,taps-1,channels)."""
        return upcast_half(self.weight.new_zeros(batch, self.taps - 1, self.channels))

    def forward(self, x: Tensor, state: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """x (B,N,channels) -> y (B,N,channels), the next state."""
        options: dict[str, Any] = {"activation": self.activation, "mask": call.mask, "segments": call.segments}
        return convolve(x, self.weight[:, 0], self.bias, state, donate=call.donate, **options)


def heads(x: Tensor, size: int) -> Tensor:
    """(B,N,H*size) -> (B,H,N,size)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """(B,H,N,E) -> (B,N,H*E)."""
    return x.transpose(1, 2).flatten(-2)


def whole(size: float, name: str) -> int:
    """Return a number of channels. Raises ValueError with the option's name unless it is whole."""
    if round(size) != size:
        raise ValueError(f"{name} gives {size} channels, which is not a whole number")
    return round(size)
