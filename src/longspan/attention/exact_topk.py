"""Softmax attention in which each query keeps only the keys that fit it best."""

import torch
from torch import nn

from ..ops.compress import select
from ..ops.tensors import merge, split
from ..states import kv_cache
from ..states.kv_cache import CachedContext, KeyValues
from .base import Attention


class ExactTopK(Attention):
    r"""Softmax over the few keys with the largest scores: all pairs are scored, and most weights are exactly 0.

    $T_i$ holds the k keys of $\mathcal{A}_i$ with the largest scores, of equal ones the first; all of them where there
    are no more. What is chosen has no gradient, the weights of the chosen have.

    ``keys``: k. Scores are made block by block of queries, and again in the backward, so that memory does not grow with
    the pairs. Time does, and is more than that of softmax: all pairs are scored there too, and none has to be chosen.
    ``record`` gets the mask that was used, one for each head.

    The state is all keys and values.

    Source: Zhao et al. 2019, section 2; there, keys of equal score are all kept. Raises ValueError for keys < 1.
    """

    name, paper, cost = "exact_topk", "1912.11637", "N^2 D"
    family = "content"
    equations = (
        r"o_i = \sum_{j \in T_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in T_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"T_i = \lbrace j \in \mathcal{A}_i : q_i \cdot k_j \text{ is among the } k \text{ largest} \rbrace",
    )
    citation = (
        "Zhao, Guangxiang and Lin, Junyang and Zhang, Zhiyuan and Ren, Xuancheng and Su, Qi and Sun, Xu",
        "Explicit Sparse Transformer: Concentrated Attention Through Explicit Selection",
        2019,
    )
    examples = ("exact_topk(keys=5)",)
    states, contexts = (KeyValues,), (CachedContext,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, keys: int = 32):
        super().__init__(dim, heads, causal=causal)
        if keys < 1:
            raise ValueError(f"keys={keys}: a query must keep at least one, so keys >= 1")
        self.keys = keys
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def start(self, batch, capacity):
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def attend(self, x, state, *, mask=None, segments=None, context=None, context_mask=None, record=None, donate=False):
        view, state = kv_cache.view(
            self._project,
            x,
            state,
            causal=self.causal,
            context=context,
            context_mask=context_mask,
            mask=mask,
            segments=segments,
            donate=donate,
        )
        q = split(self.query(x), self.heads).to(view.keys.dtype)
        n, keys = q.shape[2], view.keys.shape[2]
        everything = torch.ones(1, keys, dtype=torch.bool, device=x.device).expand(n, -1)
        if record is not None:
            matrix, used, lse = select.weights(q, view.keys, view.allowed(n), self.keys)
            record.update(mask=used, matrix=matrix, lse=lse)

        def allowed(start, stop):
            if view.mask is not None:
                return view.mask[:, :, start:stop]
            rows, columns = (torch.arange(size, device=x.device) for size in (n, keys))
            return columns[:stop] <= rows[start:stop, None] if view.causal else everything[start:stop]

        return self.out(merge(select.attend(q, view.keys, view.values, allowed, self.keys))), state

    def _project(self, x):
        return split(self.key(x), self.heads), split(self.value(x), self.heads)
