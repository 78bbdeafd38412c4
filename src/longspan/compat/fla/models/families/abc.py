"""ABC (Peng et al. 2021, 2110.02488): softmax over a fixed number of slots, each a weighted average of all tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .....modules.rotary import rotate
from .....ops.gated import slots
from .....ops.tensors import merge, positions, upcast_half
from ..family import Family
from ..mixer import Call, ConvolvedMixer, RMSNorm, ShortConv, heads
from .gsa import empty_slots, head_sizes, slot_count


class AbcState(NamedTuple):
    """The keys and values of the slots, the sums of their weights, the number of tokens, and those of convolutions."""

    keys: Tensor  # (B,H,D,slots)
    values: Tensor  # (B,H,slots,E)
    total: Tensor  # (B,H,slots) the logarithm of the sum of the weights
    position: Tensor  # (B,) int64
    q: Tensor  # (B,taps-1,HD); without a convolution (B,0,0)
    k: Tensor  # (B,taps-1,HD)
    v: Tensor  # (B,taps-1,HE)


class ABCAttention(ConvolvedMixer):
    """K and V are averages of k and v with the weights e^s, o = V^T softmax(K q / sqrt(D)); norm and gate per head."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.heads, self.slots = config.hidden_size, config.num_heads, slot_count(config)
        self.sizes, self.rotary = head_sizes(config), config.use_rope
        self.limits = config.clamp_min, config.clamp_max
        keys, values = (self.heads * size for size in self.sizes)
        self.q_proj, self.k_proj = (nn.Linear(hidden, keys, bias=False) for _ in range(2))
        self.v_proj, self.g_proj = (nn.Linear(hidden, values, bias=False) for _ in range(2))
        self.s_proj = nn.Linear(hidden, self.heads * self.slots, bias=False)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(width, config.conv_size) if config.use_short_conv else None for width in (keys, keys, values)
        )
        self.g_norm = RMSNorm(self.sizes[1], config.norm_eps, config.elementwise_affine)

    def start(self, batch: int) -> AbcState:
        keys, values = empty_slots(self.like, batch, self.heads, self.slots, self.sizes)
        position = torch.zeros(batch, dtype=torch.long, device=self.like.device)
        total = torch.full_like(values[..., 0], slots.NOTHING)
        return AbcState(keys, values, total, position, *self.start_convs(batch))

    def forward(self, x: Tensor, state: AbcState | None, call: Call) -> tuple[Tensor, AbcState | None]:
        keys, values, total, position, *recent = self.start(len(x)) if state is None else state
        (q, k, v), recent = self.project(x, recent, call)
        q, k, v = heads(q, self.sizes[0]), heads(k, self.sizes[0]), heads(v, self.sizes[1])
        if self.rotary:
            at, position = positions(x, position, mask=call.mask, segments=call.segments)
            q, k = rotate(q, at, 10000.0), rotate(k, at, 10000.0)
        logits = upcast_half(heads(self.s_proj(x), self.slots)).clamp(*self.limits)
        write, decay, total = slots.running_softmax(logits, total, call.mask, call.segments)
        o, after = slots.attend(q, k, v, write, log_decay=decay, state=(keys, values), **call.packing)
        y = self.o_proj(merge(self.g_norm(o, heads(self.g_proj(x), self.sizes[1]))))
        return y, None if state is None else AbcState(*after, total, position, *recent)


FAMILIES = (
    Family(
        "abc",
        "ABC",
        ABCAttention,
        options={
            "clamp_min": -32.0,
            "clamp_max": 32.0,
            "num_heads": 4,
            "num_slots": 64,
            "use_short_conv": False,
            "conv_size": 4,
            "expand_k": 0.5,
            "expand_v": 1.0,
            "use_rope": True,
        },
        # The original's layers do not read it.
        ignored=("gate_low_rank_dim",),
    ),
)
