"""Recurrent layers of flash-linear-attention: their common interface, and modules with the original's names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....ops.convolution import convolve
from ....ops.tensors import rms_normalize, upcast_half


class Packing(TypedDict):
    """Arguments of every recurrence; see ``Call``."""

    mask: Tensor | None
    segments: Tensor | None
    donate: bool


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

    @property
    def packing(self) -> Packing:
        """The mask, the segments and whether states may be overwritten, as arguments of a recurrence."""
        return {"mask": self.mask, "segments": self.segments, "donate": self.donate}


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
        y = rms_normalize(wide, self.eps)
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
        return convolve(x, self.weight[:, 0], self.bias, state, activation=self.activation, **call.packing)


class ConvolvedMixer(Mixer):
    """A mixer whose projections pass through short convolutions, unless these are None.

    Its modules are ``q_proj`` and ``q_conv1d`` for the letter q, and so on for each of ``letters``.
    """

    letters: ClassVar[str] = "qkv"

    def start_convs(self, batch: int) -> list[Tensor]:
        """Return zeros (batch,taps-1,channels) for each convolution; (batch,0,0) without one."""
        convs = [getattr(self, f"{letter}_conv1d") for letter in self.letters]
        return [upcast_half(self.like.new_zeros(batch, 0, 0)) if c is None else c.start(batch) for c in convs]

    def project(self, x: Tensor, recent: list[Tensor], call: Call) -> tuple[list[Tensor], list[Tensor]]:
        """Return the projections of x (B,N,hidden), and the tokens of the convolutions after those of ``recent``."""
        mixed = [getattr(self, f"{letter}_proj")(x) for letter in self.letters]
        for i, letter in enumerate(self.letters):
            if (conv := getattr(self, f"{letter}_conv1d")) is not None:
                mixed[i], recent[i] = conv(mixed[i], recent[i], call)
        return mixed, recent


def heads(x: Tensor, size: int) -> Tensor:
    """(B,N,H*size) -> (B,H,N,size)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def whole(size: float, name: str) -> int:
    """Return a number of channels. Raises ValueError with the option's name unless it is whole."""
    if round(size) != size:
        raise ValueError(f"{name} gives {size} channels, which is not a whole number")
    return round(size)
