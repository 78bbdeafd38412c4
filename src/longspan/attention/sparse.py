"""Softmax attention under any pattern of ``longspan.patterns``."""

from .. import patterns
from ..states import lookback
from .patterned import Patterned


class Sparse(Patterned):
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
        self.layer, self.pattern = layer, pattern
        seen = patterns.parse(pattern)
        seen = seen & patterns.causal() if causal else seen
        self.see(seen, kv_heads=kv_heads, rotary=rotary, rotary_layout=rotary_layout)
