"""Softmax attention as the sum of low-rank attention to all tokens and full-rank attention to a band."""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ..ops.tensors import merge, split
from ..patterns import Pattern, band, causal, everywhere
from ..states import lookback
from ..states.kv_cache import KeyValues
from ..states.window import Window
from ..states.window import empty as ring
from .base import Attention, TokenArguments


class LowRankBandState(NamedTuple):
    """The states of the band and of the low-rank part."""

    near: Window
    far: KeyValues


class LowRankBand(Attention[LowRankBandState]):
    r"""The sum of sliding-window attention and of attention to all tokens with low-rank scores.

    $q^\prime$ and $k^\prime$ have R channels per head, so that their score matrix has rank R at most. The two parts
    have separate projections, ``query, key, value`` and ``far_query, far_key, far_value``, and share ``out``. Positions
    count real tokens.

    ``rank``: R, the number of channels of the low-rank keys. ``window``: w, the number of visible tokens of the band,
    the token itself included; the bidirectional form sees the same number to the right.

    The state is a ring of ``window`` keys and values, and all low-rank keys with their values.

    Source: Guo, Qiu, Xue and Zhang 2019, "Low-Rank and Locality Constrained Self-Attention for Sequence Modeling"
    (IEEE/ACM TASLP 27), which is not on arXiv, as described in section 4.4 of the survey that is cited. Raises
    ValueError for window < 1 or rank < 1.
    """

    name, paper, cost = "lowrank_band", "2106.04554", "N^2 R + N W D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in B_i} p_{ij} v_j + \sum_{j \in \mathcal{A}_i} p_{ij}^\prime v_j^\prime",
        r"p_{ij} = \mathrm{softmax}_{j \in B_i} \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"B_i = \lbrace j \in \mathcal{A}_i : \lvert i - j \rvert < w \rbrace",
        r"p_{ij}^\prime = \mathrm{softmax}_{j \in \mathcal{A}_i} \frac{q_i^\prime \cdot k_j^\prime}{\sqrt R}",
    )
    citation = (
        "Lin, Tianyang and Wang, Yuxin and Liu, Xiangyang and Qiu, Xipeng",
        "A Survey of Transformers",
        2021,
    )
    examples = ("lowrank_band(rank=2, window=5)",)
    states = (LowRankBandState,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, rank: int = 8, window: int = 256):
        super().__init__(dim, heads, causal=causal)
        for option, value in (("rank", rank), ("window", window)):
            if value < 1:
                raise ValueError(f"{option}={value} must be at least 1")
        self.rank, self.window = rank, window
        self.near: Pattern = band(window - 1, right=0 if causal else window - 1)
        self.query, self.key, self.value, self.far_value, self.out = (nn.Linear(dim, dim) for _ in range(5))
        self.far_query, self.far_key = (nn.Linear(dim, heads * rank) for _ in range(2))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> LowRankBandState:
        size, like = self.dim // self.heads, self.weight_like
        near = ring(batch, self.heads, self.window, size, like)
        keys, values = (like.new_zeros(batch, self.heads, capacity, channels) for channels in (self.rank, size))
        return LowRankBandState(near, KeyValues(keys, values, torch.zeros(batch, dtype=torch.long, device=like.device)))

    def attend(
        self, x: Tensor, state: LowRankBandState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, LowRankBandState | None]:
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        before = (None, None) if state is None else state
        o, near = lookback.attend(q, k, v, before[0], self.near, **given)
        q, k, v = (split(part(x), self.heads) for part in (self.far_query, self.far_key, self.far_value))
        far_o, far = lookback.attend(q, k, v, before[1], causal() if self.causal else everywhere(), **given)
        return self.out(merge(o + far_o)), None if state is None else LowRankBandState(near, far)
