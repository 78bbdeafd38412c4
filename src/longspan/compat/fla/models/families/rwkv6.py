"""RWKV-6 (Peng et al. 2024, 2404.05892): a decay per channel, and a bonus for the token itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....modules.token_shift import shift, shift_start
from .....ops import gated
from .....ops.tensors import upcast_half
from ..family import Family
from ..mixer import Call, Mixer, heads, whole
from ..rwkv import (
    OPTIONS,
    LoRA,
    RwkvBlock,
    RwkvBody,
    feed_forward_width,
    group_norm,
    mixer_of,
    squared_relu,
)

HIDDEN_RATIO = 3.5


class Rwkv6State(NamedTuple):
    """The sums, and the last input."""

    sums: Tensor  # (B,H,D,E)
    last: Tensor  # (B,1,hidden)


class Lerp(nn.Module):
    """W (x + delta * mu); without ``mu`` of its own, the caller gives one per token."""

    def __init__(self, hidden: int, width: int, *, rank: int | None = None, mu: bool = True):
        super().__init__()
        self.linear = nn.Linear(hidden, width, bias=False) if rank is None else LoRA(hidden, width, rank, nn.Tanh())
        self.mu = nn.Parameter(torch.zeros(hidden)) if mu else None

    def forward(self, x: Tensor, delta: Tensor, mu: Tensor | None = None) -> Tensor:
        """x and delta (B,N,hidden), mu of this shape or None -> (B,N,width)."""
        share = self.mu if mu is None else mu
        assert share is not None
        return self.linear(torch.addcmul(x, delta, share))


class Rwkv6(Mixer):
    """o = r^T (S + Diag(u) k v^T), then S = Diag(e^(-e^w)) S + k v^T.

    Each projection reads its own mix of the token and the one before, which depends on the token. Group norm and a
    gate.
    """

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.heads, rank = config.hidden_size, config.num_heads, config.proj_low_rank_dim
        keys, values = whole(hidden * config.expand_k, "expand_k"), whole(hidden * config.expand_v, "expand_v")
        self.sizes = keys // self.heads, values // self.heads
        self.x_proj = nn.Sequential(Lerp(hidden, 5 * rank), nn.Tanh(), nn.Linear(5 * rank, hidden, bias=False))
        self.x_bias = nn.Parameter(torch.zeros(5, hidden))
        self.r_proj = Lerp(hidden, keys, mu=False)
        self.w_proj = Lerp(hidden, keys, rank=config.gate_low_rank_dim, mu=False)
        self.k_proj = Lerp(hidden, keys, mu=False)
        self.v_proj, self.g_proj = (Lerp(hidden, values, mu=False) for _ in range(2))
        self.bonus = nn.Parameter(torch.zeros(self.heads, self.sizes[0]))
        self.g_norm = nn.GroupNorm(self.heads, values, config.norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def start(self, batch: int) -> Rwkv6State:
        like = self.x_bias
        sums = upcast_half(like.new_zeros(batch, self.heads, *self.sizes))
        return Rwkv6State(sums, shift_start(like, batch, like.shape[1]))

    def forward(self, x: Tensor, state: Rwkv6State | None, call: Call) -> tuple[Tensor, Rwkv6State | None]:
        sums, last = self.start(len(x)) if state is None else state
        before, last = shift(x, last, mask=call.mask, segments=call.segments, donate=call.donate)
        delta = before - x
        first, act, second = self.x_proj
        low = act(first(x, delta)).unflatten(-1, (5, -1))  # (B,N,5,rank)
        # Not a parameter if the layer is quantized.
        weight: Any = second.weight
        up = weight.unflatten(1, (5, -1))  # (hidden,5,rank)
        mixes = torch.einsum("bnsr,hsr->sbnh", low, up)
        mixes = mixes + self.x_bias[:, None, None]
        projections = self.r_proj, self.w_proj, self.k_proj, self.v_proj, self.g_proj
        r, w, k, v, g = (project(x, delta, mu) for project, mu in zip(projections, mixes, strict=True))
        decay = -upcast_half(w).exp()
        r, k, decay = (heads(t, self.sizes[0]) for t in (r, k, decay))
        o, sums = attend(r, k, heads(v, self.sizes[1]), decay, self.bonus, sums, call)
        y = self.o_proj(group_norm(o, self.g_norm) * F.silu(g))
        return y, None if state is None else Rwkv6State(sums, last)


def attend(
    r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, sums: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """Run the recurrence, in which a token reads the sums before it decays and writes them.

    Args:
        r: (B,H,N,D).
        k: (B,H,N,D).
        v: (B,H,N,E).
        decay: (B,H,N,D), the logarithm of the decay.
        bonus: (H,D), the weight of the token itself.
        sums: (B,H,D,E), which the call may overwrite if ``call.donate``.
        call: Mask and segments.

    Returns:
        o (B,H,N,E), which is arbitrary for masked tokens, and the next sums.
    """
    own = (r * bonus[:, None] * k).sum(-1, keepdim=True) * v
    if r.shape[2] == 1:
        o = (r.to(sums.dtype) @ sums).to(v.dtype)
        _, sums = gated.recur(r, k, v, log_decay=decay, scale=1.0, state=sums, mask=call.mask, donate=call.donate)
        return o + own, sums
    # decay_attention reads after it writes, so every write moves to the next token. The last one has a place of its
    # own at the end, where nothing reads.
    segments = call.segments
    if segments is not None:
        # A state ends with its segment: what the last token of one would write into the next is dropped.
        ends = F.pad(segments.diff() != 0, (0, 1))[:, None, :, None]
        k, decay = k.masked_fill(ends, 0.0), decay.masked_fill(ends, 0.0)
        segments = torch.cat([segments, segments[:, -1:]], 1)
    if call.mask is not None:
        none = ~call.mask[:, None, :, None]
        k, decay = k.masked_fill(none, 0.0), decay.masked_fill(none, 0.0)
    q = F.pad(r, (0, 0, 0, 1))
    k, v, decay = (F.pad(t, (0, 0, 1, 0)) for t in (k, v, decay))
    o, sums = gated.recur(q, k, v, log_decay=decay, scale=1.0, segments=segments, state=sums, donate=call.donate)
    return o[:, :, :-1] + own, sums


class FeedForward(nn.Module):
    """sigmoid(W_r x_r) * W_v max(W_k x_k, 0)^2, where x_r and x_k are mixes of the token and the one before."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.key = Lerp(hidden, width)
        self.value = nn.Linear(width, hidden, bias=False)
        self.receptance = Lerp(hidden, hidden)

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:
        """x, delta (B,N,hidden) -> (B,N,hidden)."""
        return self.receptance(x, delta).sigmoid() * self.value(squared_relu(self.key(x, delta)))


def _block(config: Any, layer: int, mixer: Callable[[Any, int], nn.Module]) -> RwkvBlock:
    ffn = FeedForward(config.hidden_size, feed_forward_width(config, HIDDEN_RATIO))
    return RwkvBlock(config, layer, mixer_of(config, layer, mixer), ffn)


def _check(config: Any) -> str:
    for name in ("expand_k", "expand_v"):
        if whole(config.hidden_size * getattr(config, name), name) % config.num_heads:
            return f"{name}={getattr(config, name)} gives channels that num_heads={config.num_heads} does not divide"
    if not config.elementwise_affine:
        return "elementwise_affine must be true: the norms have weights"
    return ""


FAMILIES = (
    Family(
        "rwkv6",
        "RWKV6",
        Rwkv6,
        options={
            **OPTIONS,
            "expand_k": 0.5,
            "expand_v": 1.0,
            "hidden_ratio": HIDDEN_RATIO,
            "num_heads": 4,
            "proj_low_rank_dim": 32,
            "gate_low_rank_dim": 64,
        },
        check=_check,
        body=RwkvBody,
        block=_block,
    ),
)
