"""Softmax attention of each query over the keys with the largest scores only."""

from typing import Unpack

import torch
from torch import Tensor, nn

from ..ops.compress import select
from ..ops.tensors import merge, split
from ..states import kv_cache
from ..states.kv_cache import CachedContext, KeyValues
from .base import Attention, ContextArguments


class ExactTopK(Attention[KeyValues | CachedContext]):
    r"""Softmax over the k keys with the largest scores of each query.

    $T_i$ holds the k keys of $\mathcal{A}_i$ with the largest scores, or all keys if there are no more. Among equal
    scores the first keys win. Gradients flow through the weights of the chosen keys, not through the choice.

    ``keys``: k, the number of keys per query.

    All pairs are scored. Scores are computed in blocks of queries, and again in the backward pass, so that memory does
    not grow with the number of pairs. Time is quadratic and larger than that of softmax, which scores the same pairs
    and selects none. ``record`` gets the mask of the chosen keys, one per head. The state is all keys and values.

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
            raise ValueError(f"keys={keys} must be at least 1: the number of keys per query")
        self.keys = keys
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def start(self, batch: int, capacity: int) -> KeyValues:
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def attend(
        self, x: Tensor, state: KeyValues | CachedContext | None, **given: Unpack[ContextArguments]
    ) -> tuple[Tensor, KeyValues | CachedContext | None]:
        view, state = kv_cache.view(self._project, x, state, causal=self.causal, **given)
        q = split(self.query(x), self.heads).to(view.keys.dtype)
        n, keys = q.shape[2], view.keys.shape[2]
        everything = torch.ones(1, keys, dtype=torch.bool, device=x.device).expand(n, -1)
        if (record := given.get("record")) is not None:
            matrix, used, lse = select.weights(q, view.keys, view.allowed(n), self.keys)
            record.update(mask=used, matrix=matrix, lse=lse)

        def allowed(start: int, stop: int) -> Tensor:
            if view.mask is not None:
                return view.mask[:, :, start:stop]
            rows, columns = (torch.arange(size, device=x.device) for size in (n, keys))
            return columns[:stop] <= rows[start:stop, None] if view.causal else everything[start:stop]

        return self.out(merge(select.attend(q, view.keys, view.values, allowed, self.keys))), state

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return split(self.key(x), self.heads), split(self.value(x), self.heads)
