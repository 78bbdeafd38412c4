"""Softmax attention by content and distance over all keys: the scores of Transformer-XL without its memory."""

from typing import Any

import torch
from torch import Tensor, nn

from ..modules.sinusoidal import sinusoid
from ..ops.softmax import relative, scores, similarity
from ..ops.tensors import merge, positions, split
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention


class Relative(Attention[KeyValues]):
    """Softmax attention whose scores add a learned term of the distance between query and key.

    $r_d$ is the sinusoid of the distance d in dim channels. The bidirectional form has distances of both signs. Each
    layer has its own u and v. Positions i and j count real tokens. The state holds all keys and values;
    ``transformer_xl`` has the same scores and keeps the inputs of the last tokens.

    ``clamp``: largest distance that is distinguished (0: no limit).

    Source: Dai et al. 2019, section 3.3, without the memory.

    Raises:
        ValueError: For a negative clamp.
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
            raise ValueError(f"clamp={clamp} must be a positive distance, or 0 for no limit")
        self.clamp = clamp
        self.query, self.key, self.value, self.distance, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.u, self.v = (nn.Parameter(0.02 * torch.randn(heads, dim // heads)) for _ in range(2))

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
        content, position = q + self.u[:, None], q + self.v[:, None]
        given: kv_cache.Visible = {"mask": mask, "segments": segments, "prefix": prefix}
        if state is None and record is None and all(one is None for one in given.values()):
            return self.out(merge(self._whole(content, position, k, v))), None
        at, _ = positions(x, state and state.length, mask=mask, segments=segments)
        kept = state is not None
        view, state = kv_cache.continued(k, v, state, causal=self.causal, donate=donate, **given)
        allowed, m = view.allowed(q.shape[2]), view.keys.shape[2]
        places = scores.key_positions(at, m, kept=kept, packed=segments is not None)
        p = scores.weights(scores.products(content, view.keys) + self._apart(position, at, places), allowed)
        if record is not None:
            record.update(mask=allowed, matrix=p)
        return self.out(merge(similarity.attend(p, view.values))), state

    def _whole(self, content: Tensor, position: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A whole sequence, by shifting each row's products with all distances: O(N) memory."""
        n = k.shape[2]
        at = torch.arange(n, device=k.device)[None]
        near = None if self.causal else n - 1 - at
        ahead, scale = (0 if self.causal else n), (self.dim // self.heads) ** -0.5
        operands = relative.Operands(content, position, k, v, self._table, at, near, scale)
        return relative.attend(operands, back=n, ahead=ahead)

    def _apart(self, position: Tensor, at: Tensor, places: Tensor) -> Tensor:
        """The distance terms of queries at positions (B,N) and keys at places (B,M): (B,H,N,M)."""
        far = max(places.shape[1] - 1, 0)
        products = scores.products(position, self._table(far, -far)[None])  # (B,H,N,2M-1)
        # Invisible pairs may have any distance, so it is clamped.
        column = far - (at[:, :, None] - places[:, None, :]).clamp(-far, far)
        return products.gather(-1, column[:, None].expand(-1, self.heads, -1, -1))

    def _table(self, first: int, last: int) -> Tensor:
        """W_r r of the distances from ``first`` down to ``last``: (H,T,D)."""
        apart = torch.arange(first, last - 1, -1, device=self.u.device)
        apart = apart.clamp(-self.clamp, self.clamp) if self.clamp else apart
        return split(self.distance(sinusoid(apart[None], self.dim, self.u.dtype)), self.heads)[0]
