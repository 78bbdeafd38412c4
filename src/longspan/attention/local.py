"""Sliding-window softmax attention."""

from torch import Tensor

from ..ops.shards import active_shards
from ..patterns import band
from ..states import lookback
from ..states.kv_cache import KeyValues
from ..states.window import Window
from .base import SequenceArguments
from .patterned import Patterned


class Local(Patterned):
    """Softmax attention over the last tokens of a sliding window, with a state of fixed size.

    ``window``: w, the number of visible tokens, the token itself included; a bidirectional layer sees the same number
    to the right, $2 w - 1$ keys in total. ``kv_heads``: the number of heads of keys and values, each shared by heads /
    kv_heads query heads (0: heads). ``rotary``: the base of rotary positions (0: none). ``rotary_layout``: halves or
    interleaved.

    Source: Beltagy et al. 2020, section 3.1 (sliding window).
    """

    name, paper, cost = "local", "2004.05150", "N W D"
    family = "sparse"
    parallel_by = "tokens"
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
        self.window = window
        seen = band(window - 1, right=0 if causal else window - 1)
        self.see(seen, kv_heads=kv_heads, rotary=rotary, rotary_layout=rotary_layout)

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, state: Window | KeyValues | None, given: SequenceArguments
    ) -> tuple[Tensor, Window | KeyValues | None]:
        if (shards := active_shards()) is None:
            return super()._read(q, k, v, state, given)
        mask, segments = given.get("mask"), given.get("segments")
        return shards.band(lookback.attend, q, k, v, pattern=self.key_pattern, mask=mask, segments=segments), None
