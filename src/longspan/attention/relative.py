"""Softmax attention by content and distance over all keys: Transformer-XL's scores without its memory."""

import torch
from torch import nn

from ..modules.sinusoidal import sinusoid
from ..ops.softmax import relative, scores, similarity
from ..ops.tensors import merge, positions, split
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention


class Relative(Attention):
    r"""Softmax attention whose scores have a term of the distance, read by every query in its own way.

    $r_d$ is the sinusoid of the distance d in dim channels; a bidirectional form has distances of both signs. u and v
    are each layer's own. Positions i and j count real tokens. ``clamp``: the largest distance that is told apart (0:
    all are). The state keeps all keys and values; ``transformer_xl`` keeps the inputs of the last tokens, whose scores
    are the same.

    Source: Dai et al. 2019, section 3.3; without its memory. Raises ValueError for a negative clamp.
    """

    name, paper, cost = "relative", "1901.02860", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \sum_{j \in \mathcal{A}_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in \mathcal{A}_i} \frac{(q_i + u) \cdot k_j + (q_i + v) \cdot W_r r_{i-j}}"
        r"{\sqrt D}",
    )
    citation = (
        "Dai, Zihang and Yang, Zhilin and Yang, Yiming and Carbonell, Jaime and Le, Quoc V. and Salakhutdinov, Ruslan",
        "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context",
        2019,
    )
    examples = ("relative", "relative(clamp=3)")
    states, native_positions, replaces = (KeyValues,), "relative", "softmax"
    no_decay = ("u", "v")

    def __init__(self, dim: int, heads: int, *, causal: bool = True, clamp: int = 0):
        super().__init__(dim, heads, causal=causal)
        if clamp < 0:
            raise ValueError(f"clamp={clamp} is the largest distance told apart; it must be positive, or 0 for all")
        self.clamp = clamp
        self.query, self.key, self.value, self.distance, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.u, self.v = (nn.Parameter(0.02 * torch.randn(heads, dim // heads)) for _ in range(2))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch, capacity):
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def attend(self, x, state, *, mask=None, segments=None, prefix=None, record=None, donate=False):
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        content, position = q + self.u[:, None], q + self.v[:, None]
        arguments = {"mask": mask, "segments": segments, "prefix": prefix}
        if state is None and record is None and all(given is None for given in arguments.values()):
            return self.out(merge(self._whole(content, position, k, v))), None
        at, _ = positions(x, state and state.length, mask=mask, segments=segments)
        kept = state is not None
        if state is None:
            view = kv_cache.within(k, v, causal=self.causal, **arguments)
        else:
            view, state = kv_cache.extend(state, k, v, **arguments, donate=donate)
        allowed, m = view.allowed(q.shape[2]), view.keys.shape[2]
        places = scores.key_positions(at, m, kept=kept, packed=segments is not None)
        p = scores.weights(scores.products(content, view.keys) + self._apart(position, at, places), allowed)
        if record is not None:
            record.update(mask=allowed, matrix=p)
        return self.out(merge(similarity.attend(p, view.values))), state

    def _whole(self, content, position, k, v):
        """A whole sequence, in which a row's products with all distances are shifted: O(N) memory."""
        n = k.shape[2]
        at = torch.arange(n, device=k.device)[None]
        near = None if self.causal else n - 1 - at
        ahead, scale = (0 if self.causal else n), (self.dim // self.heads) ** -0.5
        return relative.attend(content, position, k, v, self._table, at, near, back=n, ahead=ahead, scale=scale)

    def _apart(self, position, at, places):
        """The terms of the distance, each picked by it: queries at (B,N), keys at places (B,M) -> (B,H,N,M)."""
        far = max(places.shape[1] - 1, 0)
        products = scores.products(position, self._table(far, -far)[None])  # (B,H,N,2M-1)
        # Of pairs that do not see each other the distance may be any.
        column = far - (at[:, :, None] - places[:, None, :]).clamp(-far, far)
        return products.gather(-1, column[:, None].expand(-1, self.heads, -1, -1))

    def _table(self, first, last):
        """W_r r of the distances from the first to the last, falling: (H,T,D)."""
        apart = torch.arange(first, last - 1, -1, device=self.u.device)
        apart = apart.clamp(-self.clamp, self.clamp) if self.clamp else apart
        return split(self.distance(sinusoid(apart[None], self.dim, self.u.dtype)), self.heads)[0]
