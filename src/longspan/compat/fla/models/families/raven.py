"""Raven: gated slot attention whose router lets each token write to a few slots."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....modules.init import time_steps
from .....modules.rotary import rotate
from .....ops.gated import slots
from .....ops.gated.decays import log_decay
from .....ops.tensors import merge, positions, upcast_half
from ..family import Family
from ..mixer import Call, Mixer, RMSNorm, heads
from .gsa import MAPS, check_slots, empty_slots, head_sizes, slot_count


class RavenState(NamedTuple):
    """The keys and values of the slots, and the number of tokens so far."""

    keys: Tensor  # (B,H,D,slots)
    values: Tensor  # (B,H,slots,E)
    position: Tensor  # (B,) int64


class Raven(Mixer):
    """Gated slot attention with log decays r f: f per head or slot, r the shares of the chosen slots, 0 for others."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.heads, self.slots = config.hidden_size, config.num_heads, slot_count(config)
        groups = config.num_kv_heads or self.heads
        self.repeats, self.sizes = self.heads // groups, head_sizes(config)
        self.normalizer, self.top, self.rope = config.gate_logit_normalizer, config.topk, config.rope_theta
        self.sigmoid, self.rotary, self.noisy = (
            config.router_score == "sigmoid",
            config.use_rope,
            config.add_gumbel_noise,
        )
        keys, values = (self.heads * size for size in self.sizes)
        widths = keys, keys // self.repeats, values // self.repeats
        self.feature_map = MAPS[config.feature_map](self.sizes[0])
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for width in widths)
        self.per_head = config.decay_type == "Mamba2"
        if self.per_head:
            self.a_proj = nn.Linear(hidden, groups, bias=False)
            self.A_log = nn.Parameter((1e-4 + 16 * torch.rand(groups)).log())
            self.dt_bias = nn.Parameter(time_steps(groups))
        else:
            self.f_proj = nn.Linear(hidden, groups * self.slots, bias=False)
        self.r_bias = nn.Parameter(torch.zeros(groups, self.slots)) if config.bias_rmm else None
        last = nn.Linear(hidden, groups * self.slots, bias=False)
        linear = config.router_type == "lin"
        self.r_proj = last if linear else nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), last)
        eps, affine = config.norm_eps, config.elementwise_affine
        self.q_norm, self.k_norm = (RMSNorm(self.sizes[0], eps, affine) for _ in range(2))
        self.gated = config.use_output_gate
        if self.gated:
            self.o_gate_proj = nn.Linear(hidden, values, bias=False)
            self.o_norm = RMSNorm(self.sizes[1], eps, affine)
        else:
            self.g_norm = RMSNorm(values, eps, affine)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def start(self, batch: int) -> RavenState:
        empty = empty_slots(self.like, batch, self.heads, self.slots, self.sizes)
        return RavenState(*empty, torch.zeros(batch, dtype=torch.long, device=self.like.device))

    def forward(self, x: Tensor, state: RavenState | None, call: Call) -> tuple[Tensor, RavenState | None]:
        keys, values, position = self.start(len(x)) if state is None else state
        q, k = (heads(project(x), self.sizes[0]) for project in (self.q_proj, self.k_proj))
        q, k = self.q_norm(self.feature_map(q)), self.k_norm(self.feature_map(k))
        v = F.silu(heads(self.v_proj(x), self.sizes[1]))
        if self.rotary:
            at, position = positions(x, position, mask=call.mask, segments=call.segments)
            q, k = rotate(q, at, self.rope), rotate(k, at, self.rope)
        if self.per_head:
            decay = log_decay(self.A_log, self.a_proj(x), self.dt_bias).mT[..., None]
        else:
            decay = heads(F.logsigmoid(upcast_half(self.f_proj(x))) / self.normalizer, self.slots)
        decay = decay * self.shares(x)
        if self.repeats > 1:
            k, v, decay = (t.repeat_interleave(self.repeats, 1) for t in (k, v, decay))
        o, after = slots.attend(
            q, k, v, -decay.expm1(), log_decay=decay, scale=1.0, state=(keys, values), **call.packing
        )
        o = F.silu(o)
        y = merge(self.o_norm(o, heads(self.o_gate_proj(x), self.sizes[1]))) if self.gated else self.g_norm(merge(o))
        return self.o_proj(y), None if state is None else RavenState(*after, position)

    def shares(self, x: Tensor) -> Tensor:
        """Return the shares of the chosen slots (B,H,N,slots), 0 for all others."""
        logits = upcast_half(heads(self.r_proj(x), self.slots))
        if self.noisy and self.training:
            logits = logits - torch.empty_like(logits).exponential_().log()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        ranked = scores if self.r_bias is None else scores + upcast_half(self.r_bias)[:, None]
        chosen = ranked.topk(self.top, -1).indices
        kept = scores.gather(-1, chosen)
        if self.sigmoid:
            kept = kept / (kept.sum(-1, keepdim=True) + 1e-9)
        return torch.zeros_like(scores).scatter(-1, chosen, kept)


CHOICES = {"decay_type": ("Mamba2", "GLA"), "router_score": ("sigmoid", "softmax"), "router_type": ("lin", "mlp")}


def _check(config: Any) -> str:
    for name, known in CHOICES.items():
        if getattr(config, name) not in known:
            return f"{name}={getattr(config, name)!r} must be one of {', '.join(known)}"
    if config.topk > slot_count(config):
        return f"topk={config.topk} must be at most the number of slots, {slot_count(config)}"
    return check_slots(config)


FAMILIES = (
    Family(
        "raven",
        "Raven",
        Raven,
        options={
            "gate_logit_normalizer": 8,
            "num_heads": 4,
            "num_kv_heads": None,
            "num_slots": 64,
            "expand_k": 1.0,
            "expand_v": 1.0,
            "feature_map": "swish",
            "use_output_gate": False,
            "decay_type": "Mamba2",
            "topk": 32,
            "bias_rmm": False,
            "add_gumbel_noise": True,
            "router_score": "sigmoid",
            "router_type": "lin",
            "use_rope": False,
            "rope_theta": 10000.0,
        },
        check=_check,
    ),
)
