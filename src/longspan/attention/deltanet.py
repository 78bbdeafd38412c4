"""The delta rule: what a key has stored is replaced by its new value, not added to."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import HeadNorm, ShortConvolution, unit
from ..ops import gated
from ..ops.heads import merge, split
from ..ops.linear import widen
from .base import Attention


class State(NamedTuple):
    """float32 at least."""

    sums: Tensor  # (B,H,D,D) what is stored: sums^T k is the value of a key k
    recent: Tensor  # (B,convolution-1,3 dim) the last projected queries, keys and values, side by side


class DeltaNet(Attention):
    """A fast memory of fixed size in which a new value replaces the old one of its key: the delta rule.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, o_t = RMSNorm(S_t^T q_t / sqrt(D)), with beta_t = sigmoid(w x_t)
    for each head, q, k and v after a short convolution and silu, and q and k at unit length.

    ``convolution``: tokens that the short convolution spans (0: none). ``negative``: beta_t = 2 sigmoid(w x_t), so that
    a state can change its sign along a key and so keep track of a parity (Grazzi et al. 2024, 2411.12537).

    Nothing has a bias, and there is no normaliser: the norm gives each head unit scale.

    Source: Yang et al. 2024 (2406.06484), eq. 5 and section 3.3, after Schlag et al. 2021 (2102.11174).
    """

    name, paper, cost = "deltanet", "2406.06484", "N D^2"
    citation = (
        "Yang, Songlin and Wang, Bailin and Zhang, Yu and Shen, Yikang and Kim, Yoon",
        "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        2024,
    )
    examples = ("deltanet", "deltanet(convolution=2, negative=True)")
    native = "in float32 or bfloat16"
    directions = ("causal",)
    states = (State,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, convolution: int = 4, negative: bool = False):
        super().__init__(dim, heads, causal=causal)
        self.convolution, self.negative = convolution, negative
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.rate = nn.Linear(dim, heads, bias=False)
        self.mix = ShortConvolution(3 * dim, convolution) if convolution else None
        self.norm = HeadNorm(dim // heads)
        self.out = nn.Linear(dim, dim, bias=False)

    def start(self, batch, capacity):
        size, like = self.dim // self.heads, self.like
        sums, none = like.new_zeros(batch, self.heads, size, size), like.new_zeros(batch, 0, 3 * self.dim)
        return State(widen(sums), self.mix.start(batch) if self.mix else widen(none))

    def attend(self, x, state, *, mask=None, segments=None, donate=False):
        sums, recent = self.start(len(x), 0) if state is None else state
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        if self.mix is not None:
            mixed, recent = self.mix(mixed, recent, mask=mask, segments=segments)
        q, k, v = (split(t, self.heads) for t in F.silu(mixed).chunk(3, -1))
        beta = widen(self.rate(x)).sigmoid().mT * (2.0 if self.negative else 1.0)  # (B,H,N)
        o, sums = gated.recur(
            unit(q), unit(k), v, beta=beta, mask=mask, segments=segments, state=sums, donate=donate
        )  # fmt: skip
        return self.out(merge(self.norm(o))), None if state is None else State(sums, recent)
