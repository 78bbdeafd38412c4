"""Mamba-3 (Lahoti et al. 2026, 2603.15569): a state space with the trapezoidal rule and rotations by the tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....attention.mamba3 import Mamba3State, trapezoid
from .....modules.init import time_steps
from .....ops.tensors import merge, rms_normalize, softplus, upcast_half
from ..backbone import IGNORED, OPTIONS, Backbone, BackboneFamily, MixerBlock, odd_heads, other_option
from ..mixer import Call, Mixer, RMSNorm, heads


class Mamba3(Mixer):
    """The recurrence of ``longspan.attention.mamba3``, whose projections are one map; a gate or a gated norm."""

    def __init__(self, config: Any):
        super().__init__()
        hidden, self.size, self.keys = config.hidden_size, config.head_dim, config.state_size
        width, self.floor = int(config.expand * hidden), config.A_floor
        self.heads, self.groups = width // self.size, config.n_groups
        self.angles = int(self.keys * config.rope_fraction) // 2
        keys = self.groups * self.keys
        self.widths = width, width, keys, keys, self.heads, self.heads, self.heads, self.angles
        self.in_proj = nn.Linear(hidden, sum(self.widths), bias=config.use_bias)
        self.dt_bias = nn.Parameter(time_steps(self.heads))
        self.B_bias, self.C_bias = (nn.Parameter(torch.ones(self.heads, 1, self.keys)) for _ in range(2))
        self.B_norm, self.C_norm = (RMSNorm(self.keys, config.norm_eps) for _ in range(2))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = RMSNorm(width, config.norm_eps) if config.is_outproj_norm else None
        self.out_proj = nn.Linear(width, hidden, bias=config.use_bias)

    def start(self, batch: int) -> Mamba3State:
        like = upcast_half(self.like[:0])
        return Mamba3State(
            like.new_zeros(batch, self.heads, self.keys, self.size),
            like.new_zeros(batch, self.heads, self.keys),
            like.new_zeros(batch, self.heads, self.size),
            like.new_zeros(batch, self.heads, self.angles, dtype=torch.float64),
        )

    def forward(self, x: Tensor, state: Mamba3State | None, call: Call) -> tuple[Tensor, Mamba3State | None]:
        before = self.start(len(x)) if state is None else state
        z, v, b, c, dt, rate, blend, angle = upcast_half(self.in_proj(x)).split(self.widths, -1)
        dt = softplus(dt + upcast_half(self.dt_bias))  # (B,N,H)
        decay = -softplus(rate).clamp(min=self.floor) * dt
        v = heads(v, self.size)
        q, k = self.biased(c, self.C_norm, self.C_bias), self.biased(b, self.B_norm, self.B_bias)
        o, after = trapezoid(q, k, v, dt, decay, blend.sigmoid(), angle, before, mask=call.mask, segments=call.segments)
        y, z = o + upcast_half(self.D)[:, None, None] * v, heads(z, self.size)
        if self.norm is not None:
            # One norm for each head.
            y = rms_normalize(y, self.norm.eps) * upcast_half(self.norm.get_parameter("weight")).view(self.heads, 1, -1)
        return self.out_proj(merge(y * F.silu(z)).to(x.dtype)), None if state is None else after

    def biased(self, x: Tensor, norm: RMSNorm, bias: Tensor) -> Tensor:
        """x (B,N,GD) -> normalized, with the bias of each head (B,H,N,D)."""
        return norm(heads(x, self.keys)).repeat_interleave(self.heads // self.groups, 1) + upcast_half(bias)


class Mamba3Block(MixerBlock):
    """x + mixer(norm(x)), without a feed-forward."""

    def __init__(self, config: Any):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = Mamba3(config)

    def forward(self, x: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        """x (B,N,hidden) -> (B,N,hidden), the next state."""
        y, state = self.mixer(self.norm(x), state, call)
        return x + y, state


def _check(config: Any) -> str:
    if config.is_mimo:
        return "is_mimo=True must be False: longspan has the form with one input and one output"
    if config.attn is not None:
        return f"attn={config.attn!r} must be None"
    if config.rope_fraction not in (0.5, 1.0):
        return f"rope_fraction={config.rope_fraction} must be 0.5 or 1.0"
    if int(config.state_size * config.rope_fraction) < 2:
        return f"state_size={config.state_size} with rope_fraction={config.rope_fraction} leaves no channels to rotate"
    if config.A_floor <= 0:
        return f"A_floor={config.A_floor} must be positive"
    return other_option(config) or odd_heads(config)


FAMILIES = (
    BackboneFamily(
        "mamba3",
        "Mamba3",
        lambda config, layer: Mamba3(config),
        options=OPTIONS
        | {
            "rope_fraction": 0.5,
            "A_floor": 1e-4,
            "is_outproj_norm": False,
            "is_mimo": False,
        },
        # The rank belongs to is_mimo.
        ignored=(*IGNORED, "mimo_rank"),
        check=_check,
        body=Backbone,
        block=lambda config, layer, mixer: Mamba3Block(config),
    ),
)
