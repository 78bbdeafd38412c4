"""Softmax attention under any pattern of ``longspan.patterns``."""

from typing import Any

from torch import Tensor, nn

from .. import patterns
from ..modules.rotary import check_rotary, rotate
from ..ops.tensors import merge, positions, split
from ..patterns import Pattern
from ..states import lookback
from ..states.kv_cache import KeyValues
from ..states.window import Window
from .base import Attention


class Sparse(Attention[Window | KeyValues]):
    """Each query sees the keys that a pattern allows, such as ``band(256) | globals(4)``.

    Time grows with the visible pairs.

    ``pattern``: an expression of ``longspan.patterns``, intersected with ``causal`` if the attention is causal.
    ``kv_heads``: heads of keys and values, each shared by heads / kv_heads query heads (0: as many as heads).
    ``rotary``: base of rotary positions (0: none). ``rotary_layout``: halves or interleaved.

    The state is a ring of the last keys and values if the look-back of the pattern is bounded, otherwise a KV cache.

    Source: Child et al. 2019 (1904.10509), section 4, for attention over index sets; Ainslie et al. 2023 (2305.13245)
    for shared key heads.

    Raises:
        ValueError: For an invalid pattern, ``kv_heads`` that do not divide heads, or rotary positions that do not fit
            the head dimension.
    """

    name, paper, cost = "sparse", "1904.10509", "N W D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"P_i = \lbrace j \in \mathcal{A}_i : (i, j) \in \text{pattern} \rbrace",
    )
    citation = (
        "Child, Rewon and Gray, Scott and Radford, Alec and Sutskever, Ilya",
        "Generating Long Sequences with Sparse Transformers",
        2019,
    )
    examples = (
        "sparse(pattern='band(5)')",
        "sparse(pattern='band(2, right=3) | globals(2)', kv_heads=1)",
        "sparse(pattern='by_head(dilated(2, stride=3), strided(7))', rotary=100.0)",
        "sparse(pattern='band(2) | random(1, block=16)')",
    )
    states = lookback.STATES

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        layer: int = 0,
        pattern: str = "band(256)",
        kv_heads: int = 0,
        rotary: float = 0.0,
        rotary_layout: str = "halves",
    ):
        super().__init__(dim, heads, causal=causal)
        groups = kv_heads or heads
        if groups < 0 or heads % groups:
            raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}")
        check_rotary(rotary, rotary_layout, dim // heads)
        self.layer, self.pattern, self.kv_heads = layer, pattern, kv_heads
        self.rotary, self.rotary_layout = rotary, rotary_layout
        allowed = patterns.parse(pattern)
        allowed = allowed & patterns.causal() if causal else allowed
        self.key_pattern: Pattern = allowed  # pyright: ignore[reportIncompatibleVariableOverride]  # never None
        self.groups = groups
        width = dim // heads * groups
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(dim, width) for _ in range(2))
        self.out = nn.Linear(dim, dim)

    def start(self, batch: int, capacity: int) -> Window | KeyValues:
        return lookback.empty(self.key_pattern, batch, self.groups, capacity, self.dim // self.heads, self.weight_like)

    def attend(
        self,
        x: Tensor,
        state: Window | KeyValues | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, Window | KeyValues | None]:
        q, k, v = split(self.query(x), self.heads), split(self.key(x), self.groups), split(self.value(x), self.groups)
        if self.rotary:
            before = None if state is None else state.position if isinstance(state, lookback.Window) else state.length
            at, _ = positions(x, before, mask=mask, segments=segments)
            turn = at, self.rotary, self.rotary_layout
            q, k = rotate(q, *turn), rotate(k, *turn)
        o, state = lookback.attend(
            q,
            k,
            v,
            state,
            self.key_pattern,
            layer=self.layer,
            mask=mask,
            segments=segments,
            record=record,
            donate=donate,
        )
        return self.out(merge(o)), state
