"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, 2412.06464)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....ops.tensors import upcast_half
from ..delta import WithDecay, check_heads, head_sizes
from ..family import Family
from ..mixer import Call

GATES = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


class GatedDeltaNet(WithDecay):
    """P = e^g S, S = P + b k (v - P^T k)^T, with one g and b per head of values."""

    def __init__(self, config: Any, layer: int):
        hidden, count = config.hidden_size, config.num_v_heads or config.num_heads
        conv = config.conv_size if config.use_short_conv else 0
        super().__init__(hidden, config.num_heads, count, head_sizes(config), conv=conv)
        self.negative = config.allow_neg_eigval
        self.b_proj = nn.Linear(hidden, count, bias=False)
        self.add_decay(hidden)
        if config.use_gate:
            self.g_proj = nn.Linear(hidden, count * self.sizes[1], bias=False)
        self.finish(hidden, config.norm_eps, GATES[config.output_gate_activation] if config.use_gate else None)

    def recur(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        beta = upcast_half(self.b_proj(x)).sigmoid() * (2.0 if self.negative else 1.0)
        return self.run(q, k, v, sums, beta, call, decay=self.log_decay(x))


def _check(config: Any) -> str:
    if config.output_gate_activation not in GATES:
        return f"output_gate_activation={config.output_gate_activation!r} must be one of {', '.join(GATES)}"
    return check_heads(config)


FAMILIES = (
    Family(
        "gated_deltanet",
        "GatedDeltaNet",
        GatedDeltaNet,
        options={
            "expand_v": 2.0,
            "use_gate": True,
            "use_short_conv": True,
            "allow_neg_eigval": False,
            "conv_size": 4,
            "head_dim": 256,
            "num_heads": 6,
            "num_v_heads": None,
            "num_hidden_layers": 21,
            "output_gate_activation": "swish",
        },
        check=_check,
    ),
)
