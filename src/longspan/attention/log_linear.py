"""Log-linear attention: Mamba-2 with a weight for each level of distance, and log N states."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.init import time_steps
from ..modules.norms import expanded
from ..modules.short_conv import ShortConvolution
from ..ops.gated import log_linear
from ..ops.tensors import merge, rms_normalize, softplus, split, upcast_half
from .base import Attention


class LogLinearState(NamedTuple):
    """The sums of blocks of 1, 2, 4, ... tokens, and inputs of the convolution; float32 or wider."""

    sums: Tensor  # (B,levels-1,H,channels,E) sums of the blocks whose bit of the count is 1; the last: all before
    tokens: Tensor  # (B,) int64, number of tokens
    recent: Tensor  # (B,convolution-1,channels) last inputs of the convolution; (B,0,channels) without one


class LogLinear(Attention[LogLinearState]):
    r"""Mamba-2 whose pairs of tokens are weighted by a level, the logarithm of their distance in a binary tree.

    The level $l(t, j)$ is the bit length of $t \oplus j$: 0 for j = t, else l where the smallest block of $2^l$ tokens
    that begins at a multiple of $2^l$ and holds both tokens has j in its first half. The last level also holds all
    larger distances. $\Delta_t$, $A < 0$, u, B and C are those of ``ssd``; $\lambda$ has one number per head and level.

    ``levels``: number of levels, for $2^{levels-1}$ tokens. ``channels``: size of B and C. ``key_heads``: pairs of B
    and C, each shared by heads / key_heads consecutive heads, over whose channels the norm is taken. ``expand_v``:
    width of u as a multiple of dim. ``convolution``: width of the short convolution, including the token itself (0:
    none).

    Source: Guo et al. 2025 (2506.04761), section 3, on the gates of Mamba-2; initialization as in ``ssd``.

    Raises:
        ValueError: For levels < 2, channels < 1, ``key_heads`` that do not divide heads, convolution = 1, or an
            ``expand_v`` that leaves each head a fraction of a channel.
    """

    name, paper, cost = "log_linear", "2506.04761", "N log N D^2"
    family = "gated"
    learned_state = ("recent",)
    equations = (
        r"o_t = \sum_{j \le t} \lambda_{t, l(t, j)} \, e^{A \sum_{i=j+1}^t \Delta_i} (C_t \cdot B_j) "
        r"\Delta_j u_j + d_h u_t, \quad A = -e^a",
        r"\Delta_t = \mathrm{softplus}(w \cdot x_t + b), \quad \lambda_{tl} = \mathrm{softplus}(s_l \, (W_l x_t))",
        r"y_t = W_o \, \mathrm{norm}(o_t \odot \mathrm{silu}(W_g x_t))",
    )
    citation = (
        "Guo, Han and Yang, Songlin and Goel, Tarushii and Xing, Eric P. and Dao, Tri and Kim, Yoon",
        "Log-Linear Attention",
        2025,
    )
    examples = ("log_linear(channels=5)", "log_linear(levels=4, channels=3, key_heads=2, expand_v=1.5, convolution=0)")
    directions, states = ("causal",), (LogLinearState,)
    kernels = ("convolution", "gated")
    no_decay = ("level_scale",)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        levels: int = 15,
        channels: int = 128,
        key_heads: int = 1,
        expand_v: float = 2.0,
        convolution: int = 4,
    ):
        super().__init__(dim, heads, causal=causal)
        if not 2 <= levels <= 63:
            raise ValueError(f"levels={levels} must be between 2 and 63")
        if channels < 1:
            raise ValueError(f"channels={channels} of B and C must be at least 1")
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"key_heads={key_heads} must divide heads={heads}")
        self.levels, self.channels, self.key_heads, self.expand_v = levels, channels, key_heads, expand_v
        self.convolution, self.size = convolution, expanded(dim // heads, expand_v, "expand_v")
        width, keys = heads * self.size, key_heads * channels
        self.widths = (width, keys, keys)
        self.value, self.key, self.query = (nn.Linear(dim, width, bias=False) for width in self.widths)
        self.out_gate, self.dt = nn.Linear(dim, width, bias=False), nn.Linear(dim, heads, bias=False)
        self.level, self.level_scale = (
            nn.Linear(dim, heads * levels, bias=False),
            nn.Parameter(torch.ones(heads, levels)),
        )
        self.mix = ShortConvolution(sum(self.widths), convolution) if convolution else None
        bound = convolution and convolution**-0.5
        self.shift = nn.Parameter(torch.empty(sum(self.widths)).uniform_(-bound, bound))
        self.a_log = nn.Parameter(torch.empty(heads).uniform_(1.0, 16.0).log())
        self.dt_bias = nn.Parameter(time_steps(heads))
        self.skip, self.scale = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, dim, bias=False)

    def start(self, batch: int, capacity: int) -> LogLinearState:
        like = self.weight_like
        sums, count = log_linear.start(like, batch, self.levels, self.heads, self.channels, self.size)
        none = like.new_zeros(batch, 0, sum(self.widths))
        return LogLinearState(sums, count, self.mix.start(batch) if self.mix else upcast_half(none))

    def attend(
        self,
        x: Tensor,
        state: LogLinearState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, LogLinearState | None]:
        recent = self.start(x.shape[0], 0).recent if state is None else state.recent
        mixed = torch.cat([self.value(x), self.key(x), self.query(x)], -1)
        if self.mix is not None:
            mixed, recent = self.mix(
                mixed, recent, bias=self.shift, activation="silu", mask=mask, segments=segments, donate=donate
            )
        else:
            mixed = F.silu(mixed + self.shift)
        v, k, q = (upcast_half(part) for part in mixed.split(self.widths, -1))
        v, k, q = split(v, self.heads), split(k, self.key_heads), split(q, self.key_heads)
        # In float32: bfloat16 would round a bias of -7, and with it a step size, to one part in 60.
        dt = softplus(upcast_half(self.dt(x)) + upcast_half(self.dt_bias))  # (B,N,H)
        level = upcast_half(self.level(x)).unflatten(-1, (self.heads, -1)) * upcast_half(self.level_scale)
        o, sums = log_linear.attend(
            q,
            k,
            v * dt.mT[..., None],
            softplus(level).transpose(1, 2),
            log_decay=(-upcast_half(self.a_log).exp() * dt).mT,
            scale=1.0,
            mask=mask,
            segments=segments,
            state=None if state is None else (state.sums, state.tokens),
        )
        o = merge(o + upcast_half(self.skip)[:, None, None] * v) * F.silu(upcast_half(self.out_gate(x)))
        o = o.unflatten(-1, (self.key_heads, -1))
        y = self.out((rms_normalize(o, 1e-5).flatten(-2) * upcast_half(self.scale)).to(x.dtype))
        return y, None if sums is None else LogLinearState(*sums, recent)
