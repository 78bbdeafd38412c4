"""Gated linear attention: a decay per key channel, computed from each token."""

from typing import NamedTuple, Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.norms import HeadNorm, expanded
from ..ops import gated
from ..ops.tensors import merge, split, upcast_half
from .base import Attention, TokenArguments


class GLAState(NamedTuple):
    """The decayed sum of k v^T, in float32 or better."""

    sums: Tensor  # (B,H,D,E)


class GLA(Attention[GLAState]):
    r"""Linear attention with a decay per key channel and token.

    $\alpha_t$ has one factor per key channel; the norm is RMS, per head.

    ``rank``: the number of rows of $W_1$. ``temperature``: $\tau$; a larger value makes the initial decay slower.
    ``expand_k``: the width of queries and keys as a multiple of dim. ``expand_v``: the width of values as a multiple of
    dim.

    Source: Yang et al. 2023 (2312.06635), eq. 3 and section 4.4, whose sizes are the defaults.
    """

    name, paper, cost = "gla", "2312.06635", "N D^2"
    family = "gated"
    learned_state = ("sums",)
    parallel_by = "sums"
    equations = (
        r"S_t = \mathrm{Diag}(\alpha_t) S_{t-1} + k_t v_t^\top, \quad o_t = \frac{S_t^\top q_t}{\sqrt D}, \quad "
        r"\alpha_t = \sigma(W_2 W_1 x_t + b)^{1/\tau}",
        r"y_t = W_o (\mathrm{norm}(o_t) \odot \mathrm{silu}(W_g x_t))",
    )
    citation = (
        "Yang, Songlin and Wang, Bailin and Shen, Yikang and Panda, Rameswar and Kim, Yoon",
        "Gated Linear Attention Transformers with Hardware-Efficient Training",
        2023,
    )
    examples = ("gla(rank=3, expand_v=1.5)",)
    directions, states = ("causal",), (GLAState,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        rank: int = 16,
        temperature: float = 16.0,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
    ):
        super().__init__(dim, heads, causal=causal)
        if rank < 1:
            raise ValueError(f"rank={rank} of the decay projection must be at least 1")
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be positive: it divides the logarithm of the decay")
        self.rank, self.temperature, self.expand_k, self.expand_v = rank, temperature, expand_k, expand_v
        self.sizes = expanded(dim // heads, expand_k, "expand_k"), expanded(dim // heads, expand_v, "expand_v")
        keys, values = (heads * size for size in self.sizes)
        self.query, self.key = (nn.Linear(dim, keys, bias=False) for _ in range(2))
        self.value, self.out_gate = (nn.Linear(dim, values, bias=False) for _ in range(2))
        self.decay = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, keys))
        self.norm = HeadNorm(self.sizes[1], kind="rms", gate="silu")
        self.out = nn.Linear(values, dim, bias=False)

    def start(self, batch: int, capacity: int) -> GLAState:
        return GLAState(upcast_half(self.weight_like.new_zeros(batch, self.heads, *self.sizes)))

    def attend(
        self, x: Tensor, state: GLAState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, GLAState | None]:
        q, k, v = (split(project(x), self.heads) for project in (self.query, self.key, self.value))
        log_decay = split(F.logsigmoid(upcast_half(self.decay(x))) / self.temperature, self.heads)
        o, sums = gated.recur(
            q,
            k,
            v,
            log_decay=log_decay,
            state=None if state is None else state.sums,
            **given,
        )
        y = self.out(merge(self.norm(o, split(self.out_gate(x), self.heads))))
        return y, None if state is None else GLAState(sums)
