"""Softmax attention whose heads talk: each one's scores and weights are mixtures of all heads'."""

import torch
from torch import Tensor, nn

from ..ops.softmax import scores, similarity
from ..ops.tensors import merge, split
from ..states import kv_cache
from ..states.kv_cache import CachedContext, KeyValues
from .base import Attention


class TalkingHeads(Attention):
    """Softmax attention whose heads mix their scores before the softmax, and their weights after it.

    The mixtures $P$ and $Q$ are (H,H), ``mix_scores`` and ``mix_weights``; they begin near the identity, which is
    softmax attention. A row of $U$ sums to one only where the columns of $Q$ do, and may be negative. Masks hold in the
    softmax, so a key that a query may not see has no part in any head.

    ``context_dim``: width of the context of cross attention (0: dim).

    The scores are written out, which fused softmax does without, so that it is slower than that at every length.

    Source: Shazeer et al. 2020, section 4, with as many heads of keys, of softmax and of values.
    """

    name, paper, cost = "talking_heads", "2003.02436", "N^2 (D + H)"
    family = "softmax"
    equations = (
        r"L_{ij}^g = \sum_h P_{hg} \frac{q_i^h \cdot k_j^h}{\sqrt D}, \quad "
        r"W_{ij}^g = \mathrm{softmax}_{j \in \mathcal{A}_i} L_{ij}^g",
        r"o_i^g = \sum_{j \in \mathcal{A}_i} U_{ij}^g v_j^g, \quad U_{ij}^g = \sum_h Q_{hg} W_{ij}^h",
    )
    citation = (
        "Shazeer, Noam and Lan, Zhenzhong and Cheng, Youlong and Ding, Nan and Hou, Le",
        "Talking-Heads Attention",
        2020,
    )
    states, contexts = (KeyValues,), (CachedContext,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, context_dim: int = 0):
        super().__init__(dim, heads, causal=causal)
        self.context_dim = context_dim
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, dim)
        # Plain parameters: a model gives each nn.Linear small weights, and small mixtures would silence all heads.
        self.mix_scores, self.mix_weights = (
            nn.Parameter(torch.eye(heads) + 0.02 * torch.randn(heads, heads)) for _ in range(2)
        )

    def start(self, batch, capacity):
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def _project(self, x):
        return split(self.key(x), self.heads), split(self.value(x), self.heads)

    def attend(
        self,
        x,
        state,
        *,
        mask=None,
        segments=None,
        prefix=None,
        context=None,
        context_mask=None,
        record=None,
        donate=False,
    ):
        q = split(self.query(x), self.heads)
        view, state = kv_cache.view(
            self._project,
            x,
            state,
            causal=self.causal,
            context=context,
            context_mask=context_mask,
            mask=mask,
            segments=segments,
            prefix=prefix,
            donate=donate,
        )
        allowed = view.allowed(q.shape[2])
        mixed = mix(scores.products(q, view.keys), self.mix_scores)
        # The mask comes after the mixture, which would make inf or NaN of -inf: its numbers are of both signs.
        u = mix(scores.weights(mixed, allowed), self.mix_weights)
        if record is not None:
            record.update(mask=allowed, matrix=u)
        return self.out(merge(similarity.attend(u, view.values))), state


def mix(x: Tensor, mixture: Tensor) -> Tensor:
    """x (B,H,N,M), mixture (H,G) -> (B,G,N,M): each new head a sum of the old ones, in x's dtype."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("bhnm,hg->bgnm", x, mixture.to(x.dtype))
