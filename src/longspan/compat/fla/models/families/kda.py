"""Kimi Delta Attention (Kimi Team 2025, 2510.26692)."""

from typing import Any

import torch
from torch import Tensor, nn

from .....modules.init import time_steps
from .....ops.gated.decays import log_decay
from .....ops.tensors import upcast_half
from ..delta import DeltaMixer, check_heads, head_sizes
from ..family import Family
from ..mixer import Call, heads


class KimiDeltaAttention(DeltaMixer):
    """P = Diag(e^g) S, S = P + b k (v - P^T k)^T, with one g per head of values and channel of keys."""

    def __init__(self, config: Any, layer: int):
        hidden, count = config.hidden_size, config.num_v_heads or config.num_heads
        conv = config.conv_size if config.use_short_conv else 0
        super().__init__(hidden, config.num_heads, count, head_sizes(config), conv=conv)
        keys, values = self.sizes
        self.negative, self.lower_bound = config.allow_neg_eigval, config.lower_bound
        self.f_proj = nn.Sequential(nn.Linear(hidden, values, bias=False), nn.Linear(values, count * keys, bias=False))
        self.b_proj = nn.Linear(hidden, count, bias=False)
        self.A_log = nn.Parameter((1 + 15 * torch.rand(count)).log() if not config.safe_gate else torch.zeros(count))
        self.dt_bias = nn.Parameter(time_steps(count * keys))
        self.g_proj = nn.Sequential(nn.Linear(hidden, values, bias=False), nn.Linear(values, count * values))
        self.finish(hidden, config.norm_eps, torch.sigmoid)

    def recur(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        beta = upcast_half(self.b_proj(x)).sigmoid() * (2.0 if self.negative else 1.0)
        return self.run(q, k, v, sums, beta, call, decay=self.log_decay(x))

    def log_decay(self, x: Tensor) -> Tensor:
        """Return g (B,H,N,D) in float32 at least."""
        bias = self.dt_bias.view(-1, 1, self.sizes[0])
        return log_decay(self.A_log[:, None, None], heads(self.f_proj(x), self.sizes[0]), bias, self.lower_bound)


def _check(config: Any) -> str:
    if config.safe_gate and config.lower_bound is None:
        return "safe_gate needs lower_bound"
    if config.lower_bound is not None and not -5 <= config.lower_bound < 0:
        return f"lower_bound={config.lower_bound} must be in [-5, 0)"
    return check_heads(config)


FAMILIES = (
    Family(
        "kda",
        "KDA",
        KimiDeltaAttention,
        options={
            "expand_v": 1.0,
            "use_short_conv": True,
            "allow_neg_eigval": False,
            "safe_gate": False,
            "lower_bound": None,
            "conv_size": 4,
            "head_dim": 128,
            "num_heads": 16,
            "num_v_heads": None,
        },
        check=_check,
    ),
)
