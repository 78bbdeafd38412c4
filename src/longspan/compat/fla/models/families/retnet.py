"""RetNet (Sun et al. 2023, 2307.08621): a fixed decay per head, and rotary positions."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....modules.rotary import rotate
from .....ops import gated
from .....ops.tensors import merge, positions, upcast_half
from ..family import Family
from ..mixer import Call, Mixer, RMSNorm, heads, whole


class RetNetState(NamedTuple):
    """The sums, and the number of tokens so far."""

    sums: Tensor  # (B,H,D,E)
    position: Tensor  # (B,) int64


class MultiScaleRetention(Mixer):
    """S = (1 - 2^(-5-h)) S + k v^T for head h, with rotary queries and keys; output norm (RMS) and gate per head."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_heads
        self.repeats = self.heads // (config.num_kv_heads or self.heads)
        keys, values = whole(hidden * config.expand_k, "expand_k"), whole(hidden * config.expand_v, "expand_v")
        self.sizes = keys // self.heads, values // self.heads
        self.act = F.relu if config.feature_map == "relu" else None
        widths = keys, keys // self.repeats, values // self.repeats
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for width in widths)
        self.g_proj = nn.Linear(hidden, values, bias=False) if config.use_output_gate else None
        self.o_proj = nn.Linear(values, hidden, bias=False)
        # The name depends on the kernel that flash-linear-attention uses.
        self.norm_name = "g_norm_swish_gate" if config.use_output_gate and config.fuse_norm else "g_norm"
        self.add_module(self.norm_name, RMSNorm(self.sizes[1], config.norm_eps, config.elementwise_affine))

    def start(self, batch: int) -> RetNetState:
        like = self.like
        return RetNetState(
            upcast_half(like.new_zeros(batch, self.heads, *self.sizes)),
            torch.zeros(batch, dtype=torch.long, device=like.device),
        )

    def forward(self, x: Tensor, state: RetNetState | None, call: Call) -> tuple[Tensor, RetNetState | None]:
        sums, position = self.start(len(x)) if state is None else state
        q, k = heads(self.q_proj(x), self.sizes[0]), heads(self.k_proj(x), self.sizes[0])
        v = heads(self.v_proj(x), self.sizes[1])
        if self.act is not None:
            q, k = self.act(q), self.act(k)
        at, position = positions(x, position, mask=call.mask, segments=call.segments)
        q, k = rotate(q, at, 10000.0), rotate(k, at, 10000.0)
        if self.repeats > 1:
            k, v = k.repeat_interleave(self.repeats, 1), v.repeat_interleave(self.repeats, 1)
        rates = torch.arange(self.heads, device=x.device, dtype=torch.float64)
        decay = torch.log1p(-torch.exp2(-5 - rates)).to(sums.dtype)[:, None]
        o, sums = gated.recur(q, k, v, log_decay=decay.expand(len(x), -1, x.shape[1]), state=sums, **call.packing)
        gate = None if self.g_proj is None else heads(self.g_proj(x), self.sizes[1])
        y = self.o_proj(merge(self.get_submodule(self.norm_name)(o, gate)))
        return y, None if state is None else RetNetState(sums, position)


def _check(config: Any) -> str:
    if config.feature_map not in (None, "relu"):
        return f"feature_map={config.feature_map!r} must be null or 'relu'"
    return ""


FAMILIES = (
    Family(
        "retnet",
        "RetNet",
        MultiScaleRetention,
        options={
            "expand_k": 1.0,
            "expand_v": 2.0,
            "hidden_ratio": 2,
            "num_heads": 8,
            "num_kv_heads": None,
            "feature_map": None,
            "use_output_gate": True,
            "fuse_norm": True,
        },
        # The original's models do not pass them to their layers.
        ignored=("use_short_conv", "conv_size"),
        check=_check,
    ),
)
