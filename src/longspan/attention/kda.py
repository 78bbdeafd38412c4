"""Kimi Delta Attention: the delta rule with a decay per key channel and token."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.init import time_steps
from ..modules.norms import HeadNorm
from ..modules.short_conv import ShortConvolution
from ..ops import gated
from ..ops.gated.decays import log_decay
from ..ops.tensors import merge, split, upcast_half
from .base import Attention, TokenArguments


class KDAState(NamedTuple):
    """The fast weights and the tokens of the short convolution, in float32 or better."""

    sums: Tensor  # (B,H,D,D) the fast weights: sums^T k is the value of a key k
    recent: Tensor  # (B,convolution-1,3 dim) the last projected queries, keys and values, concatenated


class KDA(Attention[KDAState]):
    r"""Kimi Delta Attention: linear attention with the delta rule and a decay per key channel and token.

    $\alpha_t$ has one factor per key channel, $\beta_t$ is one number per head. $F_2 F_1$ and $G_2 G_1$ have the rank
    of the head dimension; the norm is RMS.

    ``lower_bound``: l < 0, for a decay of $\log \alpha_t = l \, \sigma(e^a (F_2 F_1 x_t + b))$ between l and 0; -5 in
    the authors' kernels (0: no bound). ``convolution``: the width of the short convolution in tokens (0: none).

    $e^a$, one per head, is initialized uniformly in [1, 16), or to 1 with a bound. $\mathrm{softplus}(b)$ is
    initialized log-uniformly in [0.001, 0.1]. Only the decay has a bias.

    Source: Kimi Team 2025 (2510.26692), eq. 1 and section 4.
    """

    name, paper, cost = "kda", "2510.26692", "N D^2"
    family = "gated"
    learned_state = ("sums", "recent")
    parallel_by = "sums"
    equations = (
        r"P_t = \mathrm{Diag}(\alpha_t) S_{t-1}, \quad S_t = P_t + \beta_t k_t (v_t - P_t^\top k_t)^\top, \quad "
        r"o_t = \mathrm{norm}\left(\frac{S_t^\top q_t}{\sqrt D}\right) \odot \sigma(G_2 G_1 x_t)",
        r"\log \alpha_t = -e^a \, \mathrm{softplus}(F_2 F_1 x_t + b), \quad \beta_t = \sigma(u \cdot x_t)",
        r"[q_t; k_t; v_t] = \mathrm{silu}(\mathrm{convolution}(W x)_t), \quad "
        r"q_t \leftarrow \frac{q_t}{\lVert q_t \rVert}, \quad k_t \leftarrow \frac{k_t}{\lVert k_t \rVert}",
    )
    citation = ("{Kimi Team}", "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025)
    examples = ("kda", "kda(lower_bound=-5.0, convolution=0)")
    directions = ("causal",)
    kernels = ("convolution", "gated")
    states = (KDAState,)
    no_decay = ("a_log", "dt_bias")

    def __init__(self, dim: int, heads: int, *, causal: bool = True, convolution: int = 4, lower_bound: float = 0.0):
        super().__init__(dim, heads, causal=causal)
        if not lower_bound <= 0:
            raise ValueError(
                f"lower_bound={lower_bound} must be negative, or 0 for none: it bounds the logarithm of the decay"
            )
        self.convolution, self.lower_bound = convolution, lower_bound
        size = dim // heads
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.rate = nn.Linear(dim, heads, bias=False)
        self.decay, self.out_gate = (
            nn.Sequential(nn.Linear(dim, size, bias=False), nn.Linear(size, dim, bias=False)) for _ in range(2)
        )
        self.a_log = nn.Parameter(torch.zeros(heads, 1) if lower_bound else (1 + 15 * torch.rand(heads, 1)).log())
        self.dt_bias = nn.Parameter(time_steps(heads, size))
        self.mix = ShortConvolution(3 * dim, convolution) if convolution else None
        self.norm = HeadNorm(size, gate="sigmoid")
        self.out = nn.Linear(dim, dim, bias=False)

    def start(self, batch: int, capacity: int) -> KDAState:
        size, like = self.dim // self.heads, self.weight_like
        sums, none = like.new_zeros(batch, self.heads, size, size), like.new_zeros(batch, 0, 3 * self.dim)
        return KDAState(upcast_half(sums), self.mix.start(batch) if self.mix else upcast_half(none))

    def attend(
        self, x: Tensor, state: KDAState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, KDAState | None]:
        sums, recent = self.start(x.shape[0], 0) if state is None else state
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        if self.mix is not None:
            mixed, recent = self.mix(mixed, recent, activation="silu", **given)
        else:
            mixed = F.silu(mixed)
        q, k, v = (split(t, self.heads) for t in mixed.chunk(3, -1))
        beta = upcast_half(self.rate(x)).sigmoid().mT  # (B,H,N)
        logit = self.decay(x).unflatten(-1, (self.heads, -1))
        decay = log_decay(self.a_log, logit, self.dt_bias, self.lower_bound or None)  # (B,N,H,D)
        o, sums = gated.recur(
            q,
            k,
            v,
            log_decay=decay.transpose(1, 2),
            beta=beta,
            normalize="l2",
            state=sums,
            **given,
        )
        o = self.norm(o, split(self.out_gate(x), self.heads))
        return self.out(merge(o)), None if state is None else KDAState(sums, recent)
