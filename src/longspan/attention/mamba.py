"""Mamba: a state space for each channel, with step sizes, inputs and readings that depend on the token."""

from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ..modules.init import time_steps
from ..modules.short_conv import ShortConvolution
from ..ops import scan
from ..ops.tensors import upcast_half
from .base import Attention, TokenArguments


class MambaState(NamedTuple):
    """Inputs of the convolution, and the state of each channel; float32 or wider."""

    conv: Tensor  # (B,conv-1,expand*dim) last inputs of the convolution
    ssm: Tensor  # (B,expand*dim,state_dim)


class Mamba(Attention[MambaState]):
    r"""The core of Mamba: each channel has its own state space, whose step size depends on the token.

    u is silu of a short convolution of a projection of x, channel c has the rates $A_c < 0$ and the skip $d_c$, and
    $\Delta_t > 0$ is a step size per channel. $B_t$ and $C_t$ are shared by all channels. There are no heads, queries,
    keys or values: ``heads`` has no effect; the argument exists for a common signature.

    ``expand``: number of channels as a multiple of dim. ``state_dim``: states of a channel, the size of $B_t$ and
    $C_t$. ``conv``: width of the short convolution, including the token itself. ``dt_rank``: rank of the map to step
    sizes; auto is dim / 16, rounded up.

    Source: Gu and Dao 2023 (2312.00752), sections 3.2 to 3.6; defaults and initialization (A is -1, ..., -state_dim,
    $\Delta$ log-uniform in 0.001 ... 0.1, $d_c = 1$) as in the authors' Mamba module.

    Raises:
        ValueError: For an ``expand``, ``state_dim`` or ``dt_rank`` below 1, or ``conv`` below 2.
    """

    name, paper, cost = "mamba", "2312.00752", "N D"
    family = "gated"
    learned_state = ("conv", "ssm")
    equations = (
        r"h_{tc} = e^{\Delta_{tc} A_c} \odot h_{t-1,c} + \Delta_{tc} u_{tc} B_t, \quad "
        r"o_{tc} = C_t \cdot h_{tc} + d_c u_{tc}, \quad A = -e^a",
        r"[r_t; B_t; C_t] = W_s u_t, \quad \Delta_t = \mathrm{softplus}(W_\Delta r_t + b)",
        r"y_t = W_o \, (o_t \odot \mathrm{silu}(W_z x_t))",
    )
    citation = (
        "Gu, Albert and Dao, Tri",
        "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
        2023,
    )
    examples = ("mamba(state_dim=4)", "mamba(expand=1, state_dim=3, conv=2, dt_rank=2)")
    directions, states = ("causal",), (MambaState,)
    kernels = ("convolution", "scan")
    no_decay = ("a_log",)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        expand: int = 2,
        state_dim: int = 16,
        conv: int = 4,
        dt_rank: int | Literal["auto"] = "auto",
    ):
        super().__init__(dim, heads, causal=causal)
        rank = -(-dim // 16) if dt_rank == "auto" else dt_rank
        for option, value in (("expand", expand), ("state_dim", state_dim), ("dt_rank", rank)):
            if value < 1:
                raise ValueError(f"{option}={value} must be at least 1")
        self.expand, self.state_dim, self.conv, self.dt_rank = expand, state_dim, conv, dt_rank
        width = expand * dim
        self.widths = (rank, state_dim, state_dim)
        self.input, self.gate = (nn.Linear(dim, width, bias=False) for _ in range(2))
        self.mix = ShortConvolution(width, conv)
        self.shift = nn.Parameter(torch.empty(width).uniform_(-(conv**-0.5), conv**-0.5))
        self.select = nn.Linear(width, sum(self.widths), bias=False)
        self.dt = nn.Linear(rank, width, bias=False)
        nn.init.uniform_(self.dt.weight, -(rank**-0.5), rank**-0.5)
        self.dt_bias = nn.Parameter(time_steps(width))
        self.a_log = nn.Parameter(torch.arange(1.0, state_dim + 1.0).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, dim, bias=False)

    def start(self, batch: int, capacity: int) -> MambaState:
        ssm = self.weight_like.new_zeros(batch, self.expand * self.dim, self.state_dim)
        return MambaState(self.mix.start(batch), upcast_half(ssm))

    def attend(
        self, x: Tensor, state: MambaState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, MambaState | None]:
        recent, ssm = self.start(x.shape[0], 0) if state is None else state
        u, recent = self.mix(self.input(x), recent, bias=self.shift, activation="silu", **given)
        r, b, c = self.select(u).split(self.widths, -1)
        y, ssm = scan.selective(
            u,
            # In float32 from here on: bfloat16 would round a bias of -7, and with it a step size, to one part in 60.
            self.dt(r),
            -upcast_half(self.a_log).exp(),
            b,
            c,
            D=self.skip,
            z=self.gate(x),
            dt_bias=self.dt_bias,
            softplus=True,
            state=ssm,
            **given,
        )
        return self.out(y), None if state is None else MambaState(recent, ssm)
