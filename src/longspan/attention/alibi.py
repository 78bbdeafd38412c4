"""Softmax attention that forgets with distance at a fixed rate per head, in place of positions."""

import torch
from torch import nn

from ..ops.softmax import scores, similarity
from ..ops.tensors import merge, positions, split
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention


class Alibi(Attention):
    """Softmax attention whose scores fall with the distance of the key, at a fixed slope per head.

    Positions i and j count real tokens. The slopes m are these where the number of heads is a power of two; any other
    number of heads takes those of the next lower power of two, and then every second one of the next higher. It stands
    in for positions added to the tokens, also on sequences longer than those of training. The bias is float32 at least.

    The scores are written out, which fused softmax does without, so that it is slower than that at every length.

    Source: Press et al. 2021, section 3; the slopes of other numbers of heads are those of its authors' code. The paper
    has the causal form only; ``|i - j|`` is its continuation to both sides.
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

    def start(self, batch, capacity):
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def attend(self, x, state, *, mask=None, segments=None, prefix=None, record=None, donate=False):
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        at, _ = positions(x, state and state.length, mask=mask, segments=segments)
        kept, arguments = state is not None, {"mask": mask, "segments": segments, "prefix": prefix}
        if state is None:
            view = kv_cache.within(k, v, causal=self.causal, **arguments)
        else:
            view, state = kv_cache.extend(state, k, v, **arguments, donate=donate)
        allowed, products = view.allowed(q.shape[2]), scores.products(q, view.keys)
        places = scores.key_positions(at, view.keys.shape[2], kept=kept, packed=segments is not None)
        distance = (at[:, :, None] - places[:, None, :]).abs().to(products.dtype)  # (B,N,M)
        # Computed here and not kept: a buffer would be rounded where the weights are half precision.
        m = torch.tensor(slopes(self.heads), dtype=products.dtype, device=x.device)
        p = scores.weights(products - m[:, None, None] * distance[:, None], allowed)
        if record is not None:
            record.update(mask=allowed, matrix=p)
        return self.out(merge(similarity.attend(p, view.values))), state


def slopes(heads: int) -> list[float]:
    """m_h of each head; see the class.

    >>> slopes(2), slopes(3)
    ([0.0625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    power = 1 << (heads.bit_length() - 1)
    lower = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    higher = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1)]
    return lower + higher[::2][: heads - power]
