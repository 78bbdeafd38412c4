"""Comba (Hu et al. 2025, 2506.02475): a delta rule that reads with a scaled key, and corrects the query."""

from typing import Any

import torch
from torch import Tensor, nn

from .....ops.tensors import upcast_half
from ..delta import WithDecay, check_heads, head_sizes
from ..family import Family

EPS = 1e-6  # of the norms of queries and keys


class Comba(WithDecay):
    """P = e^g S, S = P + b k (v - P^T p)^T with p = c k; q - d p instead of q. Then q, k and p are normalized.

    After the norms, p = r k with r = sqrt((|k|^2 + eps) / (|k|^2 + eps / c^2)), so this is the delta rule with the step
    size r b and the values v / r.
    """

    def __init__(self, config: Any, layer: int):
        hidden, count = config.hidden_size, config.num_v_heads or config.num_heads
        conv = config.conv_size if config.use_short_conv else 0
        super().__init__(hidden, config.num_heads, count, head_sizes(config), conv=conv)
        self.b_proj = nn.Linear(hidden, count, bias=False)
        self.decay = nn.Parameter(torch.ones(self.groups))
        self.D = nn.Parameter(torch.ones(self.groups))
        self.add_decay(hidden)
        if config.use_output_gate:
            self.g_proj = nn.Linear(hidden, count * self.sizes[1], bias=False)
        self.finish(hidden, config.norm_eps, torch.sigmoid if config.use_output_gate else None)

    def recur(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        beta = upcast_half(self.b_proj(x)).sigmoid()
        q, k = (upcast_half(t).unflatten(-1, (self.groups, -1)) for t in (q, k))  # (B,N,G,D)
        share = upcast_half(self.decay).sigmoid()[:, None]
        q = q - self.D[:, None] * k * share
        square = k.square().sum(-1, keepdim=True)
        ratio = ((square + EPS) / (square + EPS / share.square())).sqrt()  # (B,N,G,1)
        ratio = ratio.repeat_interleave(self.heads // self.groups, 2)
        v = (upcast_half(v).unflatten(-1, (self.heads, -1)) / ratio).flatten(-2).to(v.dtype)
        return self.run(
            q.flatten(-2).to(v.dtype),
            k.flatten(-2).to(v.dtype),
            v,
            sums,
            beta * ratio[..., 0],
            options,
            decay=self.log_decay(x),
        )


FAMILIES = (
    Family(
        "comba",
        "Comba",
        Comba,
        options={
            "conv_size": 4,
            "head_dim": 256,
            "num_heads": 6,
            "num_v_heads": None,
            "expand_v": 2.0,
            "use_output_gate": True,
            "use_short_conv": True,
            "num_hidden_layers": 21,
        },
        # The original's models have these options and do not pass them to their layers.
        ignored=("use_output_correction", "use_inner_decay", "correction_factor"),
        check=check_heads,
    ),
)
