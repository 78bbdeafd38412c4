"""Longhorn: a state space whose decay is the closed form of an online regression on the keys."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.norms import expanded
from ..modules.short_conv import ShortConvolution
from ..ops import scan
from ..ops.tensors import upcast_half
from .base import Attention, TokenArguments


class LonghornState(NamedTuple):
    """The state of each channel, and the inputs of the convolution; float32 or wider."""

    sums: Tensor  # (B,H,E,channels)
    recent: Tensor  # (B,convolution-1,HE) last inputs of the convolution; (B,0,HE) without one


class Longhorn(Attention[LonghornState]):
    r"""A state space without a learned decay: channels recall their inputs by keys, and forget what they rewrite.

    Each channel's state is the exact minimum of $\lVert s - s_{t-1} \rVert^2 + \beta_t (s \cdot k_t - u_t)^2$, but for
    the matrix $k_t k_t^\top$, of which it keeps the diagonal. $\beta_t$ and $u_t$ are one number per channel of the
    values; the channels of a head share $k_t$ and $q_t$, of ``channels`` numbers each.

    ``channels``: the size of queries and keys. ``expand``: the width of u as a multiple of dim. ``convolution``: the
    width of the short convolution, including the token itself (0: none).

    The paper has one head.

    Source: Liu et al. 2024 (2407.14207), section 3, in the block of Mamba.

    Raises:
        ValueError: For channels < 1, convolution = 1, or an ``expand`` that leaves each head a fraction of a channel.
    """

    name, paper, cost = "longhorn", "2407.14207", "N D^2"
    family = "gated"
    learned_state = ("sums", "recent")
    equations = (
        r"S_t = (1 - \Delta_t (k_t \odot k_t)^\top) \odot S_{t-1} + (\Delta_t \odot u_t) k_t^\top, \quad "
        r"o_t = S_t q_t + d \odot u_t, \quad \Delta_t = \frac{\beta_t}{1 + \beta_t \lVert k_t \rVert^2}",
        r"u_t = \mathrm{silu}(\mathrm{convolution}(W_u x)_t), \quad k_t = W_k u_t, \quad q_t = W_q u_t, \quad "
        r"\beta_t = \sigma(W_\beta u_t + b)",
        r"y_t = W_o \, (o_t \odot \mathrm{silu}(W_z x_t))",
    )
    citation = (
        "Liu, Bo and Wang, Rui and Wu, Lemeng and Feng, Yihao and Stone, Peter and Liu, Qiang",
        "Longhorn: State Space Models are Amortized Online Learners",
        2024,
    )
    examples = ("longhorn(channels=4)", "longhorn(channels=3, expand=1.0, convolution=0)")
    directions, states = ("causal",), (LonghornState,)
    kernels = ("convolution", "scan")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        channels: int = 16,
        expand: float = 2.0,
        convolution: int = 4,
    ):
        super().__init__(dim, heads, causal=causal)
        if channels < 1:
            raise ValueError(f"channels={channels} of queries and keys must be at least 1")
        self.channels, self.expand, self.convolution = channels, expand, convolution
        self.size = expanded(dim // heads, expand, "expand")
        width = heads * self.size
        self.input, self.gate = (nn.Linear(dim, width, bias=False) for _ in range(2))
        self.mix = ShortConvolution(width, convolution) if convolution else None
        self.query, self.key = (nn.Linear(width, heads * channels, bias=False) for _ in range(2))
        self.rate = nn.Linear(width, width)
        self.skip = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, dim, bias=False)

    def start(self, batch: int, capacity: int) -> LonghornState:
        like, width = upcast_half(self.weight_like), self.heads * self.size
        sums = like.new_zeros(batch, self.heads, self.size, self.channels)
        return LonghornState(sums, self.mix.start(batch) if self.mix else like.new_zeros(batch, 0, width))

    def attend(
        self, x: Tensor, state: LonghornState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, LonghornState | None]:
        sums, recent = self.start(x.shape[0], 0) if state is None else state
        if self.mix is not None:
            u, recent = self.mix(self.input(x), recent, activation="silu", **given)
        else:
            u = F.silu(self.input(x))
        wide = upcast_half(u)
        # Each head is a row, since its channels share queries and keys.
        q, k, v, rate = (self._by_head(upcast_half(t)) for t in (self.query(u), self.key(u), wide, self.rate(u)))
        beta = rate.sigmoid()
        step = beta / (1 + beta * k.square().sum(-1, keepdim=True))
        for name in ("mask", "segments"):
            if (t := given.get(name)) is not None:
                given[name] = t.repeat_interleave(self.heads, 0)
        o, sums = scan.selective(v, step, None, k, q, state=sums.flatten(0, 1), **given)
        o = o.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2) + upcast_half(self.skip) * wide
        y = self.out(o.to(x.dtype) * F.silu(self.gate(x)))
        if state is None:
            return y, None
        return y, LonghornState(sums.unflatten(0, (-1, self.heads)), recent)

    def _by_head(self, x: Tensor) -> Tensor:
        """(B,N,H*D) -> (B*H,N,D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
