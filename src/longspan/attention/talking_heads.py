"""Softmax attention whose heads exchange scores and weights: each head uses mixtures of those of all heads."""

from typing import Unpack

import torch
from torch import Tensor, nn

from ..ops.softmax import scores, similarity
from ..ops.tensors import merge, split
from ..states import kv_cache
from ..states.kv_cache import CachedContext, KeyValues
from .base import AllArguments, Attention


class TalkingHeads(Attention[KeyValues | CachedContext]):
    """Softmax attention whose heads mix their scores before the softmax, and their weights after it.

    The mixtures $P$ and $Q$ are (H,H), ``mix_scores`` and ``mix_weights``. They start near the identity, which is
    softmax attention. A row of $U$ sums to one only if the columns of $Q$ do, and it may have negative entries. Masks
    apply in the softmax, so a masked key contributes to no head.

    ``context_dim``: width of the context of cross attention (0: dim).

    It materializes the scores, so it is slower than fused softmax at every length.

    Source: Shazeer et al. 2020, section 4, with the same number of heads for keys, softmax and values.
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
        # Plain parameters: a model initializes each nn.Linear with small weights, and small mixtures would shrink all
        # heads.
        self.mix_scores, self.mix_weights = (
            nn.Parameter(torch.eye(heads) + 0.02 * torch.randn(heads, heads)) for _ in range(2)
        )

    def start(self, batch: int, capacity: int) -> KeyValues:
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return split(self.key(x), self.heads), split(self.value(x), self.heads)

    def attend(
        self, x: Tensor, state: KeyValues | CachedContext | None, **given: Unpack[AllArguments]
    ) -> tuple[Tensor, KeyValues | CachedContext | None]:
        q = split(self.query(x), self.heads)
        view, state = kv_cache.view(self._project, x, state, causal=self.causal, **given)
        allowed = view.allowed(q.shape[2])
        mixed = mix(scores.products(q, view.keys), self.mix_scores)
        # The mask comes after the mixture, whose entries of both signs would turn -inf into inf or NaN.
        u = mix(scores.weights(mixed, allowed), self.mix_weights)
        if (record := given.get("record")) is not None:
            record["matrix"] = u
        return self.out(merge(similarity.attend(u, view.values))), state


def mix(x: Tensor, mixture: Tensor) -> Tensor:
    """Mix heads: x (B,H,N,M), mixture (H,G) -> (B,G,N,M) in the dtype of x."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("bhnm,hg->bgnm", x, mixture.to(x.dtype))
