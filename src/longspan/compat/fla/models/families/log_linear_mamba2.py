"""Log-linear Mamba-2 (Guo et al. 2025, 2506.04761): Mamba-2 whose keys are weighted by their level of distance."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....ops.gated import log_linear
from .....ops.gated.decays import step_sizes
from .....ops.tensors import merge, rms_normalize, upcast_half
from ..backbone import IGNORED, OPTIONS, Backbone, BackboneFamily, MixerBlock, odd_heads, other_option
from ..mixer import Call, GatedMLP, Mixer, RMSNorm, ShortConv, heads

LEVELS = 15  # of sequences of 2^14 tokens; the last one holds all larger distances too


class LogLinearMamba2State(NamedTuple):
    """The sums of blocks of 1, 2, 4, ... tokens, the number of tokens, and the tokens of the convolution."""

    sums: Tensor  # (B,LEVELS-1,H,D,E)
    count: Tensor  # (B,) int64
    recent: Tensor  # (B,taps-1,channels)


class LogLinearMamba2(Mixer):
    """Decay attention with keys B, queries C and values dt x, each pair weighted by its level."""

    def __init__(self, config: Any):
        super().__init__()
        self.width, self.size = int(config.expand * config.hidden_size), config.head_dim
        self.heads, self.groups, self.keys = self.width // self.size, config.n_groups, config.state_size
        channels = self.width + 2 * self.groups * self.keys
        self.widths = self.width, channels, self.heads, self.heads * LEVELS
        self.in_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=config.use_bias)
        self.conv1d = ShortConv(channels, config.conv_kernel, config.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.ones(self.heads))
        self.A_log = nn.Parameter(torch.arange(1.0, self.heads + 1).log())
        self.L, self.D = nn.Parameter(torch.ones(self.heads, LEVELS)), nn.Parameter(torch.ones(self.heads))
        # One norm for each group of channels.
        self.norm = RMSNorm(self.width, config.norm_eps)
        self.out_proj = nn.Linear(self.width, config.hidden_size, bias=config.use_bias)

    def start(self, batch: int) -> LogLinearMamba2State:
        sums, count = log_linear.start(self.like[:0], batch, LEVELS, self.heads, self.keys, self.size)
        return LogLinearMamba2State(sums, count, self.conv1d.start(batch))

    def forward(
        self, x: Tensor, state: LogLinearMamba2State | None, call: Call
    ) -> tuple[Tensor, LogLinearMamba2State | None]:
        recent = self.conv1d.start(len(x)) if state is None else state.recent
        z, mixed, dt, level = self.in_proj(x).split(self.widths, -1)
        mixed, recent = self.conv1d(mixed, recent, call)
        v, k, q = upcast_half(mixed).split([self.width, self.groups * self.keys, self.groups * self.keys], -1)
        v, k, q = heads(v, self.size), heads(k, self.keys), heads(q, self.keys)
        dt = step_sizes(dt, self.dt_bias).mT  # (B,H,N)
        weights = F.softplus(heads(upcast_half(level), LEVELS) * upcast_half(self.L)[:, None])  # (B,H,N,LEVELS)
        o, sums = log_linear.attend(
            q,
            k,
            v * dt[..., None],
            weights,
            log_decay=-upcast_half(self.A_log).exp()[:, None] * dt,
            scale=1.0,
            mask=call.mask,
            segments=call.segments,
            state=None if state is None else (state.sums, state.count),
        )
        y = merge(o + upcast_half(self.D)[:, None, None] * v) * F.silu(upcast_half(z))
        y = rms_normalize(y.unflatten(-1, (self.groups, -1)), self.norm.eps)
        y = self.out_proj((y.flatten(-2) * upcast_half(self.norm.get_parameter("weight"))).to(x.dtype))
        return y, None if sums is None else LogLinearMamba2State(*sums, recent)


class LogLinearBlock(MixerBlock):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Any):
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = LogLinearMamba2(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, 4, None)

    def forward(self, x: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        """x (B,N,hidden) -> (B,N,hidden), the next state."""
        y, state = self.mixer(self.mixer_norm(x), state, call)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


def _check(config: Any) -> str:
    for name, value in (("D_has_hdim", False), ("norm_before_gate", False), ("rmsnorm", True), ("attn", None)):
        if (given := getattr(config, name)) != value:
            return f"{name}={given!r} must be {value!r}"
    if tuple(config.dt_limit) != (0.0, float("inf")):
        return f"dt_limit={config.dt_limit!r} must be [0.0, inf]"
    return other_option(config) or odd_heads(config)


FAMILIES = (
    BackboneFamily(
        "log_linear_mamba2",
        "LogLinearMamba2",
        lambda config, layer: LogLinearMamba2(config),
        options=OPTIONS
        | {
            "conv_kernel": 4,
            "use_conv_bias": True,
            "D_has_hdim": False,
            "rmsnorm": True,
            "norm_before_gate": False,
            "dt_limit": [0.0, float("inf")],
        },
        # Both initialize weights.
        ignored=(*IGNORED, "conv_init", "A_init_range"),
        check=_check,
        body=Backbone,
        block=lambda config, layer, mixer: LogLinearBlock(config),
    ),
)
