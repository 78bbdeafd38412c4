"""DeltaNet (Schlag et al. 2021, 2102.11174; Yang et al. 2024, 2406.06484)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....ops.tensors import upcast_half, wide_dtype
from ..delta import DeltaMixer
from ..family import Family
from ..mixer import Call, heads, whole


class DeltaNet(DeltaMixer):
    """S = S + b k (v - S^T k)^T, b = sigmoid(w x)."""

    def __init__(self, config: Any, layer: int):
        hidden, count = config.hidden_size, config.num_heads
        keys = whole(hidden * config.expand_k / count, "hidden_size * expand_k / num_heads")
        values = whole(hidden * config.expand_v / count, "hidden_size * expand_v / num_heads")
        conv = config.conv_size if config.use_short_conv else 0
        super().__init__(hidden, count, count, (keys, values), conv=conv, activation=config.qk_activation)
        self.negative, self.qk_norm = config.allow_neg_eigval, config.qk_norm
        self.b_proj = nn.Linear(hidden, count, bias=False) if config.use_beta else None
        if config.use_gate:
            self.g_proj = nn.Linear(hidden, count * values, bias=False)
        self.finish(hidden, config.norm_eps, F.silu if config.use_gate else None)

    def recur(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if self.b_proj is None:
            beta = torch.ones(*x.shape[:2], self.heads, device=x.device, dtype=wide_dtype(x))
        else:
            beta = upcast_half(self.b_proj(x)).sigmoid()
        beta = beta * 2 if self.negative else beta
        if self.qk_norm == "l2":
            return self.run(q, k, v, sums, beta, call)
        q, k = (F.normalize(heads(t, self.sizes[0]), p=1, dim=-1, eps=1e-6) for t in (q, k))
        q, k = (t.transpose(1, 2).flatten(-2) for t in (q, k))
        return self.run(q, k, v, sums, beta, call, normalize=None)


def _check(config: Any) -> str:
    for name, known in (("qk_norm", ("l2", "sum")), ("qk_activation", ("silu", "relu", "elu", "identity"))):
        if getattr(config, name) not in known:
            return f"{name}={getattr(config, name)!r} must be one of {', '.join(known)}"
    return ""


FAMILIES = (
    Family(
        "delta_net",
        "DeltaNet",
        DeltaNet,
        options={
            "expand_k": 1.0,
            "expand_v": 1.0,
            "num_heads": 16,
            "use_gate": False,
            "use_short_conv": True,
            "allow_neg_eigval": False,
            "conv_size": 4,
            "use_beta": True,
            "qk_norm": "l2",
            "qk_activation": "silu",
        },
        # The original always has an output norm.
        ignored=("use_output_norm",),
        check=_check,
    ),
)
