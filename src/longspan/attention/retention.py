"""Retention: a sum of keys and values with a fixed decay rate per head."""

import math
from functools import partial
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from .._utils.constants import constant
from ..modules.norms import HeadNorm, expanded
from ..modules.rotary import check_rotary, rotate
from ..ops import gated
from ..ops.tensors import merge, positions, split, upcast_half, wide_dtype
from .base import Attention, TokenArguments


class RetentionState(NamedTuple):
    """The state without rotary positions; float32 or wider."""

    sums: Tensor  # (B,H,D,E) decayed sum of k v^T


class RetentionRotaryState(NamedTuple):
    """The state with rotary positions; float32 or wider."""

    sums: Tensor  # (B,H,D,E) as above, of rotated keys
    position: Tensor  # (B,) int64, real tokens so far


class Retention(Attention[RetentionState | RetentionRotaryState]):
    """Linear attention with a fixed decay per head, rotary positions, and a norm as the normalizer.

    The norm removes mean and variance of each head's channels. The decay rates are the paper's for any number of heads:
    each head remembers twice as long as the one before.

    ``rotary``: base of the rotary positions of queries and keys (0: none). ``rotary_layout``: halves or interleaved.
    ``expand_v``: width of the values as a multiple of dim; the paper doubles it.

    Pairs of channels rotate at rates $b^{-2j/D}$ with the base b; the authors' code spaces the rates from 1 to 1/base
    inclusive. The authors' rescaling of the products cancels in the norm and is left out.

    Source: Sun et al. 2023 (2307.08621), eqs 5-8; initialization and the lack of biases are those of the authors'
    torchscale.

    Raises:
        ValueError: For rotary positions that do not fit the head dimension, or an ``expand_v`` that leaves each head
            fewer than 2 value channels or a fraction of one.
    """

    name, paper, cost = "retention", "2307.08621", "N D^2"
    family = "gated"
    learned_state = ("sums",)
    parallel_by = "sums"
    equations = (
        r"S_t = \gamma_h S_{t-1} + k_t v_t^\top, \quad o_t = \frac{S_t^\top q_t}{\sqrt D}, \quad "
        r"\gamma_h = 1 - 2^{-5-h}, \quad h = 0, 1, \ldots",
        r"y_t = W_o (\mathrm{norm}(o_t) \odot \mathrm{silu}(W_g x_t))",
    )
    citation = (
        "Sun, Yutao and Dong, Li and Huang, Shaohan and Ma, Shuming and Xia, Yuqing and Xue, Jilong and Wang, Jianyong "
        "and Wei, Furu",
        "Retentive Network: A Successor to Transformer for Large Language Models",
        2023,
    )
    examples = ("retention", "retention(rotary=0.0, expand_v=1.0)")
    directions, states = ("causal",), (RetentionState, RetentionRotaryState)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        rotary: float = 10000.0,
        rotary_layout: str = "halves",
        expand_v: float = 2.0,
    ):
        super().__init__(dim, heads, causal=causal)
        check_rotary(rotary, rotary_layout, dim // heads)
        self.sizes = dim // heads, expanded(dim // heads, expand_v, "expand_v")
        if self.sizes[1] < 2:
            raise ValueError(f"expand_v={expand_v} leaves each head 1 value channel; the norm needs at least 2")
        width = heads * self.sizes[1]
        self.rotary, self.rotary_layout, self.expand_v = rotary, rotary_layout, expand_v
        self.log_decay = [math.log1p(-(2.0 ** (-5 - head))) for head in range(heads)]
        self.query, self.key = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.value, self.out_gate = (nn.Linear(dim, width, bias=False) for _ in range(2))
        self.norm = HeadNorm(self.sizes[1], kind="group", gate="silu")
        self.out = nn.Linear(width, dim, bias=False)
        for part in (self.query, self.key, self.value, self.out_gate):
            nn.init.xavier_uniform_(part.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out.weight)

    def start(self, batch: int, capacity: int) -> RetentionState | RetentionRotaryState:
        sums = upcast_half(self.weight_like.new_zeros(batch, self.heads, *self.sizes))
        if not self.rotary:
            return RetentionState(sums)
        return RetentionRotaryState(sums, torch.zeros(batch, dtype=torch.long, device=sums.device))

    def attend(
        self, x: Tensor, state: RetentionState | RetentionRotaryState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, RetentionState | RetentionRotaryState | None]:
        mask, segments = given.get("mask"), given.get("segments")
        q, k, v = (split(project(x), self.heads) for project in (self.query, self.key, self.value))
        make = RetentionState
        if self.rotary:
            start = state.position if isinstance(state, RetentionRotaryState) else None
            at, end = positions(x, start, mask=mask, segments=segments)
            turn = at, self.rotary, self.rotary_layout
            q, k = rotate(q, *turn), rotate(k, *turn)
            make = partial(RetentionRotaryState, position=end)
        log_decay = constant(tuple(self.log_decay), wide_dtype(x), x.device)
        o, sums = gated.recur(
            q,
            k,
            v,
            log_decay=log_decay[:, None].expand(v.shape[:3]),
            state=None if state is None else state.sums,
            **given,
        )
        y = self.out(merge(self.norm(o, split(self.out_gate(x), self.heads))))
        return y, None if state is None else make(sums)
