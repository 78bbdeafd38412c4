"""Gated DeltaNet: the delta rule with a decay per head and token."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.init import time_steps
from ..modules.norms import HeadNorm, expanded
from ..modules.short_conv import ShortConvolution
from ..ops import gated
from ..ops.gated.decays import log_decay
from ..ops.tensors import merge, split, upcast_half
from .base import Attention, TokenArguments


class GatedDeltaNetState(NamedTuple):
    """The fast weights and the tokens of the short convolution, in float32 or better."""

    sums: Tensor  # (B,H,D,E) the fast weights: sums^T k is the value of a key k
    recent: Tensor  # (B,convolution-1,2GD+HE) the last projected queries, keys and values, concatenated


class GatedDeltaNet(Attention[GatedDeltaNetState]):
    r"""Linear attention with the delta rule and a decay per head and token.

    $\alpha_t$ and $\beta_t$ are one number per head; the norm is RMS.

    ``key_heads``: the number of heads of queries and keys, each shared by heads / key_heads consecutive heads of values
    (0: heads). ``expand_k``: the key dimension D of a head, as a multiple of dim / heads. ``expand_v``: the value
    dimension E of a head, as a multiple of dim / heads. ``convolution``: the width of the short convolution in tokens
    (0: none). ``gate``: whether the output has a gate. ``negative``: use $\beta_t = 2 \sigma(u \cdot x_t)$, as in
    ``deltanet``.

    $e^a$ is initialized uniformly in (0, 16], $\mathrm{softplus}(b)$ log-uniformly in [0.001, 0.1]. Only the decay has
    a bias. The layers of Qwen3-Next are of this kind, with dim 2048, 32 heads, key_heads=16 and expand_k=2.0.

    Source: Yang, Kautz and Hatamizadeh 2024 (2412.06464), eq. 10 and section 3.4.
    """

    name, paper, cost = "gated_deltanet", "2412.06464", "N D^2"
    family = "gated"
    learned_state = ("sums", "recent")
    parallel_by = "sums"
    equations = (
        r"P_t = \alpha_t S_{t-1}, \quad S_t = P_t + \beta_t k_t (v_t - P_t^\top k_t)^\top, \quad "
        r"o_t = \mathrm{norm}\left(\frac{S_t^\top q_t}{\sqrt D}\right) \odot \mathrm{silu}(W_g x_t)",
        r"\log \alpha_t = -e^a \, \mathrm{softplus}(w \cdot x_t + b), \quad \beta_t = \sigma(u \cdot x_t)",
        r"[q_t; k_t; v_t] = \mathrm{silu}(\mathrm{convolution}(W x)_t), \quad "
        r"q_t \leftarrow \frac{q_t}{\lVert q_t \rVert}, \quad k_t \leftarrow \frac{k_t}{\lVert k_t \rVert}",
    )
    citation = (
        "Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali",
        "Gated Delta Networks: Improving Mamba2 with Delta Rule",
        2024,
    )
    examples = (
        "gated_deltanet",
        "gated_deltanet(key_heads=1, expand_k=1.5, expand_v=1.0, convolution=0, gate=False, negative=True)",
    )
    directions = ("causal",)
    kernels = ("convolution", "gated")
    states = (GatedDeltaNetState,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        key_heads: int = 0,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        convolution: int = 4,
        gate: bool = True,
        negative: bool = False,
    ):
        super().__init__(dim, heads, causal=causal)
        self.groups = key_heads or heads
        if self.groups < 0 or heads % self.groups:
            raise ValueError(f"key_heads={key_heads} must divide heads={heads}")
        self.key_heads, self.expand_k, self.expand_v = key_heads, expand_k, expand_v
        self.convolution, self.gate, self.negative = convolution, gate, negative
        self.sizes = expanded(dim // heads, expand_k, "expand_k"), expanded(dim // heads, expand_v, "expand_v")
        keys, values = self.groups * self.sizes[0], heads * self.sizes[1]
        self.widths = (keys, keys, values)
        self.query, self.key, self.value = (nn.Linear(dim, width, bias=False) for width in self.widths)
        self.rate, self.decay = (nn.Linear(dim, heads, bias=False) for _ in range(2))
        # 1 - rand is never 0: weight decay would turn the logarithm of 0 into NaN.
        self.a_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())
        self.dt_bias = nn.Parameter(time_steps(heads))
        self.mix = ShortConvolution(sum(self.widths), convolution) if convolution else None
        self.out_gate = nn.Linear(dim, values, bias=False) if gate else None
        self.norm = HeadNorm(self.sizes[1], gate="silu" if gate else "none")
        self.out = nn.Linear(values, dim, bias=False)

    def start(self, batch: int, capacity: int) -> GatedDeltaNetState:
        like = self.weight_like
        sums, none = like.new_zeros(batch, self.heads, *self.sizes), like.new_zeros(batch, 0, sum(self.widths))
        return GatedDeltaNetState(upcast_half(sums), self.mix.start(batch) if self.mix else upcast_half(none))

    def attend(
        self, x: Tensor, state: GatedDeltaNetState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, GatedDeltaNetState | None]:
        sums, recent = self.start(x.shape[0], 0) if state is None else state
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        if self.mix is not None:
            mixed, recent = self.mix(mixed, recent, activation="silu", **given)
        else:
            mixed = F.silu(mixed)
        q, k, v = mixed.split(self.widths, -1)
        q, k = (split(t, self.groups) for t in (q, k))
        beta = upcast_half(self.rate(x)).sigmoid().mT * (2.0 if self.negative else 1.0)  # (B,H,N)
        decay = log_decay(self.a_log, self.decay(x), self.dt_bias)
        o, sums = gated.recur(
            q,
            k,
            split(v, self.heads),
            log_decay=decay.mT,
            beta=beta,
            normalize="l2",
            state=sums,
            **given,
        )
        o = self.norm(o, split(self.out_gate(x), self.heads) if self.out_gate is not None else None)
        return self.out(merge(o)), None if state is None else GatedDeltaNetState(sums, recent)
