"""Sliding-window softmax attention."""

from typing import Any

from torch import Tensor, nn

from ..modules.rotary import check_rotary, rotate
from ..ops.shards import active_shards
from ..ops.tensors import merge, positions, split
from ..patterns import Pattern, band
from ..states import lookback
from ..states.kv_cache import KeyValues
from ..states.window import Window
from .base import Attention


class Local(Attention[Window | KeyValues]):
    """Softmax attention over the last tokens of a sliding window, with a state of fixed size.

    ``window``: w, the number of visible tokens, the token itself included; a bidirectional layer sees the same number
    to the right, $2 w - 1$ keys in total. ``kv_heads``: the number of heads of keys and values, each shared by heads /
    kv_heads query heads (0: heads). ``rotary``: the base of rotary positions (0: none). ``rotary_layout``: halves or
    interleaved.

    Source: Beltagy et al. 2020, section 3.1 (sliding window).
    """

    name, paper, cost = "local", "2004.05150", "N W D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"P_i = \lbrace j \in \mathcal{A}_i : \lvert i - j \rvert < w \rbrace",
    )
    citation = (
        "Beltagy, Iz and Peters, Matthew E. and Cohan, Arman",
        "Longformer: The Long-Document Transformer",
        2020,
    )
    examples = ("local(window=5)", "local(window=3, kv_heads=1, rotary=100.0)")
    states = (lookback.Window,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        window: int = 256,
        kv_heads: int = 0,
        rotary: float = 0.0,
        rotary_layout: str = "halves",
    ):
        super().__init__(dim, heads, causal=causal)
        if window < 1:
            raise ValueError(f"window={window} must be at least 1: the token itself is visible")
        groups = kv_heads or heads
        if groups < 0 or heads % groups:
            raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}")
        check_rotary(rotary, rotary_layout, dim // heads)
        self.window, self.kv_heads, self.groups = window, kv_heads, groups
        self.rotary, self.rotary_layout = rotary, rotary_layout
        self.key_pattern: Pattern = band(window - 1, right=0 if causal else window - 1)  # pyright: ignore[reportIncompatibleVariableOverride] never None here
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(dim, dim // heads * groups) for _ in range(2))
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
            start = state.position if isinstance(state, Window) else None
            at, _ = positions(x, start, mask=mask, segments=segments)
            turn = at, self.rotary, self.rotary_layout
            q, k = rotate(q, *turn), rotate(k, *turn)
        if (shards := active_shards()) is not None:
            o = shards.band(lookback.attend, q, k, v, pattern=self.key_pattern, mask=mask, segments=segments)
            return self.out(merge(o)), None
        o, state = lookback.attend(
            q, k, v, state, self.key_pattern, mask=mask, segments=segments, record=record, donate=donate
        )
        return self.out(merge(o)), state
