"""Stick-breaking attention: sigmoids in place of the softmax, from the nearest key on."""

from torch import Tensor

from ..ops.softmax import stick_breaking
from ..ops.tensors import merge
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .cached import Cached, places


class StickBreaking(Cached[KeyValues]):
    r"""Each key takes a share of the weight that the nearer keys have left.

    Of equal keys the nearest takes the most, so that the mechanism needs no positions. A token does not see itself
    unless ``current``, and the first token reads 0. Weights add up to less than 1: a query may read nothing.

    ``kv_heads``: heads of keys and values, each shared by heads / kv_heads query heads (0: as many as heads).
    ``current``: a token sees itself, as its nearest key.

    Source: Tan et al. 2024, eqs. 1 to 3.

    Raises:
        ValueError: For ``kv_heads`` that do not divide heads.
    """

    name, paper, cost = "stick_breaking", "2410.17980", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \sum_{j < i} p_{ij} v_j, \quad p_{ij} = b_{ij} \prod_{l = j + 1}^{i - 1} (1 - b_{il}), \quad "
        r"b_{ij} = \sigma \left( \frac{q_i \cdot k_j}{\sqrt D} \right)",
    )
    citation = (
        "Tan, Shawn and Yang, Songlin and Courville, Aaron and Panda, Rameswar and Shen, Yikang",
        "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study",
        2024,
    )
    examples = ("stick_breaking", "stick_breaking(kv_heads=1, current=True)")
    states = (KeyValues,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, kv_heads: int = 0, current: bool = False):
        super().__init__(dim, heads, causal=causal)
        self.create(kv_heads)
        self.current = current

    def start(self, batch: int, capacity: int) -> KeyValues:
        return kv_cache.empty(batch, self.groups, capacity, self.dim // self.heads, self.weight_like)

    def _run(
        self, x: Tensor, state: KeyValues | None, real: Tensor | None, donate: bool
    ) -> tuple[Tensor, KeyValues | None]:
        q, k, v = self.heads_of(x, real=real)
        if state is None:
            return self.out(merge(stick_breaking.attend(q, k, v, current=self.current))), None
        view, past = kv_cache.extend(state, k, v, mask=real, donate=donate)
        at = places(view, past, state.length, x.shape[1], real)
        o = stick_breaking.attend(q.to(view.keys.dtype), view.keys, view.values, at, current=self.current)
        return self.out(merge(o)), past
