"""DeltaNet: linear attention with the delta rule, which replaces the value of a key."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.norms import HeadNorm
from ..modules.short_conv import ShortConvolution
from ..ops import gated
from ..ops.tensors import merge, split, upcast_half
from .base import Attention, TokenArguments


class DeltaNetState(NamedTuple):
    """The fast weights and the tokens of the short convolution, in float32 or better."""

    sums: Tensor  # (B,H,D,D) the fast weights: sums^T k is the value of a key k
    recent: Tensor  # (B,convolution-1,3 dim) the last projected queries, keys and values, concatenated


class DeltaNet(Attention[DeltaNetState]):
    r"""Linear attention with the delta rule: a new value replaces the stored value of its key.

    $\beta_t$ is one number per head; the norm is RMS.

    ``convolution``: the width of the short convolution in tokens (0: none). ``negative``: use $\beta_t = 2 \sigma(w
    \cdot x_t)$, so that the state can change its sign along a key and track a parity (Grazzi et al. 2024, 2411.12537).

    There are no biases, and no normalizer: the norm gives each head unit scale.

    Source: Yang et al. 2024 (2406.06484), eq. 5 and section 3.3, after Schlag et al. 2021 (2102.11174).
    """

    name, paper, cost = "deltanet", "2406.06484", "N D^2"
    family = "gated"
    learned_state = ("sums", "recent")
    parallel_by = "sums"
    equations = (
        r"S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top k_t)^\top, \quad "
        r"o_t = \mathrm{norm}\left(\frac{S_t^\top q_t}{\sqrt D}\right), \quad \beta_t = \sigma(w \cdot x_t)",
        r"[q_t; k_t; v_t] = \mathrm{silu}(\mathrm{convolution}(W x)_t), \quad "
        r"q_t \leftarrow \frac{q_t}{\lVert q_t \rVert}, \quad k_t \leftarrow \frac{k_t}{\lVert k_t \rVert}",
    )
    citation = (
        "Yang, Songlin and Wang, Bailin and Zhang, Yu and Shen, Yikang and Kim, Yoon",
        "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        2024,
    )
    examples = ("deltanet", "deltanet(convolution=2, negative=True)")
    directions = ("causal",)
    kernels = ("convolution", "gated")
    states = (DeltaNetState,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, convolution: int = 4, negative: bool = False):
        super().__init__(dim, heads, causal=causal)
        self.convolution, self.negative = convolution, negative
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.rate = nn.Linear(dim, heads, bias=False)
        self.mix = ShortConvolution(3 * dim, convolution) if convolution else None
        self.norm = HeadNorm(dim // heads)
        self.out = nn.Linear(dim, dim, bias=False)

    def start(self, batch: int, capacity: int) -> DeltaNetState:
        size, like = self.dim // self.heads, self.weight_like
        sums, none = like.new_zeros(batch, self.heads, size, size), like.new_zeros(batch, 0, 3 * self.dim)
        return DeltaNetState(upcast_half(sums), self.mix.start(batch) if self.mix else upcast_half(none))

    def attend(
        self, x: Tensor, state: DeltaNetState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, DeltaNetState | None]:
        sums, recent = self.start(x.shape[0], 0) if state is None else state
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        if self.mix is not None:
            mixed, recent = self.mix(mixed, recent, activation="silu", **given)
        else:
            mixed = F.silu(mixed)
        q, k, v = (split(t, self.heads) for t in mixed.chunk(3, -1))
        beta = upcast_half(self.rate(x)).sigmoid().mT * (2.0 if self.negative else 1.0)  # (B,H,N)
        o, sums = gated.recur(q, k, v, beta=beta, normalize="l2", state=sums, **given)
        return self.out(merge(self.norm(o))), None if state is None else DeltaNetState(sums, recent)
