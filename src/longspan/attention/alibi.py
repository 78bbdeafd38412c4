"""ALiBi: softmax attention with a bias that falls linearly with distance, in place of positions."""

from typing import Any

from torch import Tensor, nn

from .._utils.constants import constant
from ..ops.softmax import scores, similarity
from ..ops.tensors import merge, positions, split
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention


class Alibi(Attention[KeyValues]):
    """Softmax attention with a penalty that is linear in the distance, with a fixed slope per head.

    Positions i and j count real tokens. The formula of the slopes m holds for a power of two of heads. Another number
    of heads takes the slopes of the next lower power of two, then every second slope of the next higher one.

    The bias replaces position embeddings, and works on sequences longer than those of training. It is computed in
    float32 or better. The scores are materialized, so this is slower than fused softmax at every length.

    Source: Press et al. 2021, section 3; the slopes of other numbers of heads are those of its authors' code. The paper
    has the causal form only; ``|i - j|`` extends it to both directions.
    """

    name, paper, cost = "alibi", "2108.12409", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \sum_{j \in \mathcal{A}_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in \mathcal{A}_i}\left(\frac{q_i \cdot k_j}{\sqrt D} - m_h \lvert i - j "
        r"\rvert\right)",
        r"m_h = 2^{-8 h / H}, \quad h = 1, \ldots, H",
    )
    citation = (
        "Press, Ofir and Smith, Noah A. and Lewis, Mike",
        "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        2021,
    )
    states, native_positions, replaces = (KeyValues,), "alibi", "softmax"

    def __init__(self, dim: int, heads: int, *, causal: bool = True):
        super().__init__(dim, heads, causal=causal)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> KeyValues:
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def attend(
        self,
        x: Tensor,
        state: KeyValues | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, KeyValues | None]:
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        at, _ = positions(x, state and state.length, mask=mask, segments=segments)
        kept = state is not None
        given: kv_cache.Visible = {"mask": mask, "segments": segments, "prefix": prefix}
        view, state = kv_cache.continued(k, v, state, causal=self.causal, donate=donate, **given)
        allowed, products = view.allowed(q.shape[2]), scores.products(q, view.keys)
        places = scores.key_positions(at, view.keys.shape[2], kept=kept, packed=segments is not None)
        distance = (at[:, :, None] - places[:, None, :]).abs().to(products.dtype)  # (B,N,M)
        # Not a buffer, which would be rounded with half-precision weights.
        m = constant(tuple(slopes(self.heads)), products.dtype, x.device)
        p = scores.weights(products - m[:, None, None] * distance[:, None], allowed)
        if record is not None:
            record.update(mask=allowed, matrix=p)
        return self.out(merge(similarity.attend(p, view.values))), state


def slopes(heads: int) -> list[float]:
    """Return the slope m_h of each head.

    >>> slopes(2), slopes(3)
    ([0.0625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    power = 1 << (heads.bit_length() - 1)
    lower = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    higher = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1)]
    return lower + higher[::2][: heads - power]
