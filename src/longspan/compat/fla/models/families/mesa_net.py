"""MesaNet (von Oswald et al. 2025, 2506.05233): a ridge regression on all tokens so far, solved for each token."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....ops.gated import mesa
from .....ops.tensors import merge, unit, upcast_half
from ..family import Family
from ..mixer import Call, ConvolvedMixer, RMSNorm, ShortConv, heads


class MesaNetState(NamedTuple):
    """The sums of b k k^T and b k v^T side by side, and the tokens of the convolutions of queries and keys."""

    sums: Tensor  # (B,H,D,2D)
    q: Tensor  # (B,taps-1,HD)
    k: Tensor  # (B,taps-1,HD)


class MesaNet(ConvolvedMixer):
    """o = G^T (H + Diag(l))^-1 q for the decayed sums H of b k k^T and G of b k v^T; output norm, and gate, per head.

    The original rounds queries and keys to float16; here they keep their precision.
    """

    letters = "qk"

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.size, self.heads = config.hidden_size, config.head_dim, config.num_heads
        self.floor, self.steps = config.lambda_lower_bound, config.max_cg_step_training
        width = self.heads * self.size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for _ in range(3))
        self.a_proj, self.b_proj = (nn.Linear(hidden, self.heads) for _ in range(2))
        self.lambda_params = nn.Parameter(torch.full((width,), math.log(math.expm1(max(1 - self.floor, 1e-3)))))
        self.q_conv1d, self.k_conv1d = (ShortConv(width, config.conv_size) for _ in range(2))
        self.g_proj = nn.Linear(hidden, width, bias=False) if config.use_output_gate else None
        self.o_norm = RMSNorm(self.size, config.norm_eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def start(self, batch: int) -> MesaNetState:
        sums = self.like.new_zeros(batch, self.heads, self.size, 2 * self.size)
        return MesaNetState(upcast_half(sums), *self.start_convs(batch))

    def forward(self, x: Tensor, state: MesaNetState | None, call: Call) -> tuple[Tensor, MesaNetState | None]:
        sums, *recent = self.start(len(x)) if state is None else state
        (q, k), recent = self.project(x, recent, call)
        q, k = (unit(heads(upcast_half(t), self.size)) for t in (q, k))
        o, _, sums = mesa.attend(
            q,
            k,
            upcast_half(heads(self.v_proj(x), self.size)),
            beta=upcast_half(self.b_proj(x)).sigmoid().mT,
            log_decay=F.logsigmoid(upcast_half(self.a_proj(x))).mT,
            ridge=(F.softplus(upcast_half(self.lambda_params)) + self.floor).view(self.heads, -1),
            steps=self.steps,
            state=sums,
            **call.packing,
        )
        gate = None if self.g_proj is None else heads(self.g_proj(x), self.size)
        y = self.o_proj(merge(self.o_norm(o, gate).to(x.dtype)))
        return y, None if state is None else MesaNetState(sums, *recent)


def _check(config: Any) -> str:
    if config.lambda_lower_bound <= 0:
        return f"lambda_lower_bound={config.lambda_lower_bound} must be positive"
    training, decoding = config.max_cg_step_training, config.max_cg_step_decoding
    if training != decoding:
        return f"max_cg_step_training={training} and max_cg_step_decoding={decoding} must be equal"
    return ""


FAMILIES = (
    Family(
        "mesa_net",
        "MesaNet",
        MesaNet,
        options={
            "use_output_gate": False,
            "conv_size": 4,
            "num_heads": 16,
            "head_dim": 128,
            "lambda_lower_bound": 0.25,
            "max_cg_step_training": 30,
            "max_cg_step_decoding": 30,
        },
        # The original's layers always have convolutions.
        ignored=("use_short_conv",),
        check=_check,
    ),
)
