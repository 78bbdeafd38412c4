"""LightNet (Qin et al. 2024, 2405.21022): keys normalized by a running softmax over time."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....ops import gated
from .....ops.gated import slots
from .....ops.tensors import merge, upcast_half
from ..family import Family
from ..mixer import Call, ConvolvedMixer, RMSNorm, ShortConv, heads

EPS = 1e-6  # of the output norm, whatever norm_eps is


class LightNetState(NamedTuple):
    """The sums, the logarithm of the sum of e^k, and the tokens of the convolutions; without them (B,0,0)."""

    sums: Tensor  # (B,H,D,E)
    total: Tensor  # (B,H,D) log sum e^k over all tokens
    q: Tensor  # (B,taps-1,HD)
    k: Tensor  # (B,taps-1,HD)
    v: Tensor  # (B,taps-1,HE)


class LightNet(ConvolvedMixer):
    """S = Diag(e^(z_(t-1) - z_t)) S + e^(k - z_t) v^T with z_t = log sum e^k.

    RMS norm over all heads, and a gate of low rank.
    """

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden = config.hidden_size
        self.heads, keys = sizes(config)
        self.sizes = keys, hidden // self.heads
        widths = self.heads * keys, self.heads * keys, hidden
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for width in widths)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(width, config.conv_size, activation=None) if config.use_short_conv else None for width in widths
        )
        rank = config.gate_low_rank_dim
        self.g_proj = nn.Sequential(nn.Linear(hidden, rank, bias=False), nn.Linear(rank, hidden, bias=False))
        self.g_norm = RMSNorm(hidden, EPS, config.elementwise_affine)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def start(self, batch: int) -> LightNetState:
        sums = upcast_half(self.like.new_zeros(batch, self.heads, *self.sizes))
        return LightNetState(sums, torch.full_like(sums[..., 0], slots.NOTHING), *self.start_convs(batch))

    def forward(self, x: Tensor, state: LightNetState | None, call: Call) -> tuple[Tensor, LightNetState | None]:
        sums, total, *recent = self.start(len(x)) if state is None else state
        mixed, recent = self.project(x, recent, call)
        q, k, v = heads(F.silu(mixed[0]), self.sizes[0]), heads(mixed[1], self.sizes[0]), heads(mixed[2], self.sizes[1])
        keys, decay, total = slots.running_softmax(upcast_half(k), total, call.mask, call.segments)
        o, sums = gated.recur(q, keys.to(v.dtype), v, log_decay=decay, state=sums, **call.packing)
        y = self.o_proj(self.g_norm(merge(o), self.g_proj(x)))
        return y, None if state is None else LightNetState(sums, total, *recent)


def sizes(config: Any) -> tuple[int, int]:
    """Return the number of heads, and their channels of keys."""
    count = config.num_heads or config.hidden_size // config.expand_ratio
    return count, config.expand_ratio or config.hidden_size // config.num_heads


def _check(config: Any) -> str:
    if config.expand_ratio is None and config.num_heads is None:
        return "one of expand_ratio and num_heads must be given"
    count, keys = sizes(config)
    if not count or config.hidden_size % count:
        return f"hidden_size={config.hidden_size} does not divide into {count} heads of {keys} channels"
    return ""


FAMILIES = (
    Family(
        "lightnet",
        "LightNet",
        LightNet,
        options={
            "num_heads": None,
            "expand_ratio": 128,
            "use_short_conv": False,
            "conv_size": 4,
            "gate_low_rank_dim": 128,
        },
        check=_check,
    ),
)
