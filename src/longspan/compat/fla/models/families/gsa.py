"""Gated slot attention (Zhang et al. 2024, 2409.07146): softmax over a fixed number of slots that forget."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .....ops.gated import slots
from .....ops.tensors import merge, upcast_half
from ..family import Family
from ..mixer import Call, ConvolvedMixer, RMSNorm, ShortConv, heads, whole
from .linear_attn import T2R, Plain

EPS = 1e-5  # of the output norm, whatever norm_eps is
MAPS = {"swish": lambda size: Plain(F.silu), "relu": lambda size: Plain(F.relu), "t2r": T2R}


class GsaState(NamedTuple):
    """The keys and values of the slots, and the tokens of the convolutions; without them (B,0,0)."""

    keys: Tensor  # (B,H,D,slots)
    values: Tensor  # (B,H,slots,E)
    q: Tensor  # (B,taps-1,HD)
    k: Tensor  # (B,taps-1,HD/repeats)
    v: Tensor  # (B,taps-1,HE/repeats)


class GatedSlotAttention(ConvolvedMixer):
    """K = Diag(a) K + (1 - a) k^T, V = Diag(a) V + (1 - a) v^T, o = V^T softmax(K q); RMS norm over all heads."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.heads, self.slots = config.hidden_size, config.num_heads, slot_count(config)
        self.repeats = self.heads // (config.num_kv_heads or self.heads)
        self.normalizer = config.gate_logit_normalizer
        self.sizes = head_sizes(config)
        keys, values = (self.heads * size for size in self.sizes)
        widths = keys, keys // self.repeats, values // self.repeats
        self.feature_map = MAPS[config.feature_map](self.sizes[0])
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for width in widths)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(width, config.conv_size) if config.use_short_conv else None for width in widths
        )
        self.f_proj = nn.Linear(hidden, self.heads // self.repeats * self.slots, bias=False)
        self.g_norm = RMSNorm(hidden, EPS, config.elementwise_affine)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def start(self, batch: int) -> GsaState:
        return GsaState(*empty_slots(self.like, batch, self.heads, self.slots, self.sizes), *self.start_convs(batch))

    def forward(self, x: Tensor, state: GsaState | None, call: Call) -> tuple[Tensor, GsaState | None]:
        keys, values, *recent = self.start(len(x)) if state is None else state
        (q, k, v), recent = self.project(x, recent, call)
        decay = heads(F.logsigmoid(upcast_half(self.f_proj(x))) / self.normalizer, self.slots)
        q, k = (self.feature_map(heads(t, self.sizes[0])) for t in (q, k))
        v = F.silu(heads(v, self.sizes[1]))
        if self.repeats > 1:
            k, v, decay = (t.repeat_interleave(self.repeats, 1) for t in (k, v, decay))
        o, after = slots.attend(
            q, k, v, -decay.expm1(), log_decay=decay, scale=1.0, state=(keys, values), **call.packing
        )
        y = self.o_proj(self.g_norm(F.silu(merge(o))))
        return y, None if state is None else GsaState(*after, *recent)


def empty_slots(like: Tensor, batch: int, count: int, number: int, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the keys (batch,count,D,number) and values (batch,count,number,E) of slots before the first token."""
    keys, values = sizes
    shapes = (keys, number), (number, values)
    first, second = (upcast_half(like.new_zeros(batch, count, *shape)) for shape in shapes)
    return first, second


def head_sizes(config: Any) -> tuple[int, int]:
    """Return the channels of a head of keys, and of values."""
    hidden, count = config.hidden_size, config.num_heads
    return whole(hidden * config.expand_k, "expand_k") // count, whole(hidden * config.expand_v, "expand_v") // count


def slot_count(config: Any) -> int:
    """Return the number of slots of a head."""
    return head_sizes(config)[0] if config.num_slots is None else config.num_slots


def check_slots(config: Any) -> str:
    """Return why the feature map, or the width of values, is not supported; "" if both are."""
    if config.feature_map not in MAPS:
        return f"feature_map={config.feature_map!r} must be one of {', '.join(MAPS)}"
    return ""


def _check(config: Any) -> str:
    if config.expand_v != 1:
        return f"expand_v={config.expand_v} must be 1, since the output norm has hidden_size weights"
    return check_slots(config)


FAMILIES = (
    Family(
        "gsa",
        "GSA",
        GatedSlotAttention,
        options={
            "gate_logit_normalizer": 8,
            "num_heads": 4,
            "num_kv_heads": None,
            "num_slots": 64,
            "use_short_conv": False,
            "conv_size": 4,
            "expand_k": 1.0,
            "expand_v": 1.0,
            "feature_map": "swish",
        },
        # The original's layers do not read them.
        ignored=("clamp_min", "clamp_max", "use_output_gate", "use_norm"),
        check=_check,
    ),
)
