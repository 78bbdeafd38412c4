"""Comba (Hu et al. 2025, 2506.02475): a delta rule that reads with a scaled key, and corrects the query."""

from typing import Any

import torch
from torch import Tensor, nn

from .....ops.gated import general
from .....ops.tensors import unit, upcast_half
from ..delta import WithDecay, check_heads, head_sizes
from ..family import Family
from ..mixer import Call, heads


class Comba(WithDecay):
    """S = e^g S + b k (v - S^T p)^T with p = c k, which reads the state before it decays; q - d p instead of q.

    Queries, k and p are normalized after that.
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

    def recur(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        beta = upcast_half(self.b_proj(x)).sigmoid().mT[..., None]  # (B,H,N,1)
        q, k, v = heads(q, self.sizes[0]), heads(k, self.sizes[0]), heads(v, self.sizes[1])
        read = k * self.decay.sigmoid()[:, None, None].to(k.dtype)
        q, k, read = (unit(upcast_half(t)) for t in (q - self.D[:, None, None].to(q.dtype) * read, k, read))
        # Each head of values has its own step size, but shares keys with its group.
        k, read, q = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, read, q))
        write = (k * beta).to(v.dtype)
        return general.recur(
            q.to(v.dtype),
            write,
            v,
            read=read.to(v.dtype),
            erase=write,
            log_decay=self.log_decay(x),
            read_before_decay=True,
            state=sums,
            **call.packing,
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
