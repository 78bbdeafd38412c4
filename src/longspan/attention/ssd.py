"""The state space model of Mamba-2, as attention whose decay and step size depend on the token."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.init import time_steps
from ..modules.norms import expanded
from ..modules.short_conv import ShortConvolution
from ..ops import gated
from ..ops.gated.decays import step_sizes
from ..ops.tensors import merge, rms_normalize, split, upcast_half
from .base import Attention, TokenArguments


class SSDState(NamedTuple):
    """Sums of keys and values, and inputs of the convolution; float32 or wider."""

    sums: Tensor  # (B,H,channels,E) decayed sum of B_t (dt_t x_t)^T
    recent: Tensor  # (B,convolution-1,channels) last inputs of the convolution; (B,0,channels) without one


class SSD(Attention[SSDState]):
    r"""The core of Mamba-2: keys and values decay at a rate per head, scaled by the token's step size.

    $A < 0$, the step size $\Delta_t > 0$ and the skip $d_h$ are numbers per head. u, B and C correspond to ``value``,
    ``key`` and ``query``: they are silu of a short convolution of projections of x. The norm is RMS.

    ``channels``: size of B and C, Mamba's d_state. ``key_heads``: pairs of B and C, each shared by heads / key_heads
    consecutive heads, over whose channels the norm is taken. ``expand_v``: width of u as a multiple of dim.
    ``convolution``: width of the short convolution, including the token itself (0: none).

    Source: Dao and Gu 2024 (2405.21060), sections 6 and 7; defaults and initialization (A uniform in -16 ... -1,
    $\Delta$ log-uniform in 0.001 ... 0.1, $d_h = 1$) as in the authors' Mamba2 module.

    Raises:
        ValueError: For channels < 1, ``key_heads`` that do not divide heads, convolution = 1, or an ``expand_v`` that
            leaves each head a fraction of a channel.
    """

    name, paper, cost = "ssd", "2405.21060", "N D^2"
    family = "gated"
    learned_state = ("sums", "recent")
    parallel_by = "sums"
    equations = (
        r"S_t = e^{\Delta_t A} S_{t-1} + B_t (\Delta_t u_t)^\top, \quad o_t = S_t^\top C_t + d_h u_t, \quad "
        r"A = -e^a, \quad \Delta_t = \mathrm{softplus}(w \cdot x_t + b)",
        r"y_t = W_o \, \mathrm{norm}(o_t \odot \mathrm{silu}(W_g x_t))",
    )
    citation = (
        "Dao, Tri and Gu, Albert",
        "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured SSDState Space Duality",
        2024,
    )
    examples = ("ssd(channels=5)", "ssd(channels=3, key_heads=2, expand_v=1.5, convolution=0)")
    directions, states = ("causal",), (SSDState,)
    kernels = ("convolution", "gated")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        channels: int = 128,
        key_heads: int = 1,
        expand_v: float = 2.0,
        convolution: int = 4,
    ):
        super().__init__(dim, heads, causal=causal)
        if channels < 1:
            raise ValueError(f"channels={channels} of B and C must be at least 1")
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"key_heads={key_heads} must divide heads={heads}")
        self.channels, self.key_heads, self.expand_v, self.convolution = channels, key_heads, expand_v, convolution
        self.size = expanded(dim // heads, expand_v, "expand_v")
        width, keys = heads * self.size, key_heads * channels
        self.widths = (width, keys, keys)
        self.value, self.key, self.query = (nn.Linear(dim, width, bias=False) for width in self.widths)
        self.out_gate, self.dt = nn.Linear(dim, width, bias=False), nn.Linear(dim, heads, bias=False)
        self.mix = ShortConvolution(sum(self.widths), convolution) if convolution else None
        bound = convolution and convolution**-0.5
        self.shift = nn.Parameter(torch.empty(sum(self.widths)).uniform_(-bound, bound))
        self.a_log = nn.Parameter(torch.empty(heads).uniform_(1.0, 16.0).log())
        self.dt_bias = nn.Parameter(time_steps(heads))
        self.skip, self.scale = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, dim, bias=False)

    def start(self, batch: int, capacity: int) -> SSDState:
        like = self.weight_like
        sums = like.new_zeros(batch, self.heads, self.channels, self.size)
        none = like.new_zeros(batch, 0, sum(self.widths))
        return SSDState(upcast_half(sums), self.mix.start(batch) if self.mix else upcast_half(none))

    def attend(
        self, x: Tensor, state: SSDState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, SSDState | None]:
        sums, recent = self.start(x.shape[0], 0) if state is None else state
        mixed = torch.cat([self.value(x), self.key(x), self.query(x)], -1)
        if self.mix is not None:
            mixed, recent = self.mix(mixed, recent, bias=self.shift, activation="silu", **given)
        else:
            mixed = F.silu(mixed + self.shift)
        v, k, q = (upcast_half(part) for part in mixed.split(self.widths, -1))
        k, q = split(k, self.key_heads), split(q, self.key_heads)
        dt = step_sizes(self.dt(x), self.dt_bias)  # (B,N,H)
        v = v.unflatten(-1, (self.heads, -1))  # (B,N,H,E)
        o, sums = gated.recur(
            q,
            k,
            (v * dt[..., None]).transpose(1, 2),
            log_decay=(-upcast_half(self.a_log).exp() * dt).mT,
            scale=1.0,
            state=sums,
            **given,
        )
        o = merge(o) + (upcast_half(self.skip)[:, None] * v).flatten(-2)
        o = o * F.silu(upcast_half(self.out_gate(x)))
        o = o.unflatten(-1, (self.key_heads, -1))
        y = self.out((rms_normalize(o, 1e-5).flatten(-2) * upcast_half(self.scale)).to(x.dtype))
        return y, None if state is None else SSDState(sums, recent)
