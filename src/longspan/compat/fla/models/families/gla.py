"""Gated linear attention (Yang et al. 2023, 2312.06635): a decay per channel of the keys."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .....ops import gated
from .....ops.tensors import merge, upcast_half
from ..family import Family
from ..mixer import Call, ConvolvedMixer, RMSNorm, ShortConv, heads, whole


class GlaState(NamedTuple):
    """The sums, and the tokens of the convolutions of queries, keys and values; without them (B,0,0)."""

    sums: Tensor  # (B,H,D,E)
    q: Tensor  # (B,taps-1,HD)
    k: Tensor  # (B,taps-1,GD)
    v: Tensor  # (B,taps-1,GE)


class GatedLinearAttention(ConvolvedMixer):
    """S = Diag(e^g) S + k v^T with g = logsigmoid(W2 W1 x + b) / 16, output norm and gate per head."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden = config.hidden_size
        keys, values = whole(hidden * config.expand_k, "expand_k"), whole(hidden * config.expand_v, "expand_v")
        self.heads, groups = config.num_heads, config.num_kv_heads or config.num_heads
        self.repeats = self.heads // groups
        self.sizes = keys // self.heads, values // self.heads
        widths = keys, keys // self.repeats, values // self.repeats
        self.clamp_min = config.clamp_min
        self.act = F.relu if config.feature_map == "relu" else None
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for width in widths)
        self.g_proj = nn.Linear(hidden, values, bias=False) if config.use_output_gate else None
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(width, config.conv_size) if config.use_short_conv else None for width in widths
        )
        self.gk_proj = nn.Sequential(nn.Linear(hidden, 16, bias=False), nn.Linear(16, widths[1]))
        self.o_proj = nn.Linear(values, hidden, bias=False)
        # The name depends on the kernel that flash-linear-attention uses.
        self.norm_name = "g_norm_swish_gate" if config.use_output_gate and config.fuse_norm else "g_norm"
        self.add_module(self.norm_name, RMSNorm(self.sizes[1], config.norm_eps, config.elementwise_affine))

    def start(self, batch: int) -> GlaState:
        return GlaState(upcast_half(self.like.new_zeros(batch, self.heads, *self.sizes)), *self.start_convs(batch))

    def forward(self, x: Tensor, state: GlaState | None, call: Call) -> tuple[Tensor, GlaState | None]:
        sums, *recent = self.start(len(x)) if state is None else state
        mixed, recent = self.project(x, recent, call)
        decay = F.logsigmoid(upcast_half(self.gk_proj(x))) / 16
        if self.clamp_min is not None:
            decay = decay.clamp(min=self.clamp_min)
        q, k, decay = (heads(t, self.sizes[0]) for t in (*mixed[:2], decay))
        v = heads(mixed[2], self.sizes[1])
        if self.repeats > 1:
            k, decay, v = (t.repeat_interleave(self.repeats, 1) for t in (k, decay, v))
        if self.act is not None:
            q, k = self.act(q), self.act(k)
        o, sums = gated.recur(q, k, v, log_decay=decay, state=sums, **call.packing)
        gate = None if self.g_proj is None else heads(self.g_proj(x), self.sizes[1])
        y = self.o_proj(merge(self.get_submodule(self.norm_name)(o, gate)))
        return y, None if state is None else GlaState(sums, *recent)


def _check(config: Any) -> str:
    if config.feature_map not in (None, "relu"):
        return f"feature_map={config.feature_map!r} must be null or 'relu'"
    if not config.use_gk or config.use_gv:
        return "use_gk must be true and use_gv false"
    return ""


FAMILIES = (
    Family(
        "gla",
        "GLA",
        GatedLinearAttention,
        options={
            "expand_k": 0.5,
            "expand_v": 1.0,
            "num_heads": 4,
            "num_kv_heads": None,
            "feature_map": None,
            "use_short_conv": False,
            "conv_size": 4,
            "use_output_gate": True,
            "clamp_min": None,
            "use_gk": True,
            "use_gv": False,
            "fuse_norm": True,
        },
        check=_check,
    ),
)
