"""Gated DeltaProduct (Siems et al. 2025, 2502.10297): several steps of the delta rule for each token."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .....ops.tensors import upcast_half
from ..delta import WithDecay, head_sizes
from ..family import Family
from ..mixer import Call


class GatedDeltaProduct(WithDecay):
    """n steps of the delta rule per token: the decay belongs to the first, the query reads after the last.

    The recurrence runs on n N tokens, whose queries are 0 but for the last of each token.
    """

    def __init__(self, config: Any, layer: int):
        hidden, count = config.hidden_size, config.num_heads
        conv = config.conv_size if config.use_short_conv else 0
        super().__init__(hidden, count, count, head_sizes(config), conv=conv, steps=config.num_householder)
        self.negative, self.forgets = config.allow_neg_eigval, config.use_forget_gate
        self.b_proj = nn.Linear(hidden, count * self.steps, bias=False)
        if self.forgets:
            self.add_decay(hidden)
        if config.use_output_gate:
            self.g_proj = nn.Linear(hidden, count * self.sizes[1], bias=False)
        self.finish(hidden, config.norm_eps, F.silu if config.use_output_gate else None)

    def recur(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        n = self.steps
        beta = upcast_half(self.b_proj(x)).sigmoid() * (2.0 if self.negative else 1.0)
        decay = self.log_decay(x) if self.forgets else None
        k, v, beta = (t.unflatten(-1, (n, -1)).flatten(1, 2) for t in (k, v, beta))  # (B,nN,...)
        q = F.pad(q[:, :, None], (0, 0, n - 1, 0)).flatten(1, 2)
        if decay is not None:
            decay = F.pad(decay[..., None], (0, n - 1)).flatten(-2)
        mask, segments = (None if t is None else t.repeat_interleave(n, 1) for t in (call.mask, call.segments))
        o, sums = self.run(q, k, v, sums, beta, Call(mask, segments, call.donate), decay=decay)
        return o[:, :, n - 1 :: n], sums


FAMILIES = (
    Family(
        "gated_deltaproduct",
        "GatedDeltaProduct",
        GatedDeltaProduct,
        options={
            "conv_size": 4,
            "head_dim": 256,
            "num_heads": 6,
            "expand_v": 2.0,
            "use_output_gate": True,
            "use_short_conv": True,
            "num_hidden_layers": 21,
            "use_forget_gate": False,
            "allow_neg_eigval": False,
            "num_householder": 1,
        },
    ),
)
