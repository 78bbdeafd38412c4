"""Softmax attention with a KV cache: standard transformer attention, and the baseline for all other mechanisms."""

from typing import Any

from torch import Tensor, nn

from ..modules.norms import HeadNorm
from ..modules.rotary import check_rotary, rotate
from ..ops.shards import active_shards
from ..ops.softmax import dense
from ..ops.tensors import merge, positions, split
from ..states import kv_cache
from ..states.kv_cache import CachedContext, CacheView, KeyValues
from .base import Attention
from .grouped import check_groups
from .validation import check_width


class Softmax(Attention[KeyValues | CachedContext]):
    """Softmax over all keys: exact, quadratic in the length, with a KV cache as its state.

    ``kv_heads``: heads of keys and values, each shared by heads / kv_heads query heads (0: as many as heads).
    ``dropout``: probability of dropping a weight in training. ``rotary``: base of rotary positions (0: none).
    ``rotary_layout``: halves or interleaved. ``context_dim``: width of the context of cross attention (0: dim).
    ``head_dim``: channels of a head (0: dim / heads). ``qk_norm``: epsilon of RMS norms of each head's queries and
    keys, with learned weights, before they are turned (0: no norms).

    The recurrent form keeps every key and value ("stateful softmax" in Katharopoulos et al. 2020, appendix C.1).

    Source: Vaswani et al. 2017, section 3.2; shared key heads as in Ainslie et al. 2023 (2305.13245).

    Raises:
        ValueError: For ``kv_heads`` that do not divide heads, dropout outside [0, 1), or rotary positions that do not
            fit the head dimension.
    """

    name, paper, cost = "softmax", "1706.03762", "N^2 D"
    family = "softmax"
    parallel_by = "tokens"
    equations = (
        r"o_i = \sum_{j \in \mathcal{A}_i} p_{ij} v_j, \quad "
        r"p_{ij} = \frac{e^{q_i \cdot k_j / \sqrt D}}{\sum_{l \in \mathcal{A}_i} e^{q_i \cdot k_l / \sqrt D}}",
    )
    citation = (
        "Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and "
        "Gomez, Aidan N. and Kaiser, Lukasz and Polosukhin, Illia",
        "Attention Is All You Need",
        2017,
    )
    examples = (
        "softmax",
        "softmax(kv_heads=1)",
        "softmax(rotary=100.0)",
        "softmax(rotary=10.0, rotary_layout='interleaved')",
        "softmax(kv_heads=1, rotary=100.0, head_dim=6, qk_norm=1e-06)",
    )
    states, contexts = (KeyValues,), (CachedContext,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        kv_heads: int = 0,
        dropout: float = 0.0,
        rotary: float = 0.0,
        rotary_layout: str = "halves",
        context_dim: int = 0,
        head_dim: int = 0,
        qk_norm: float = 0.0,
    ):
        super().__init__(dim, heads, causal=causal)
        groups = check_groups(kv_heads, heads)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        if head_dim < 0 or qk_norm < 0:
            raise ValueError(f"head_dim={head_dim} and qk_norm={qk_norm} must not be negative")
        self.kv_heads, self.dropout, self.context_dim = kv_heads, dropout, context_dim
        self.rotary, self.rotary_layout = rotary, rotary_layout
        self.head_dim, self.qk_norm = head_dim, qk_norm
        self.groups, self.size = groups, head_dim or dim // heads
        check_rotary(rotary, rotary_layout, self.size)
        self.query = nn.Linear(dim, heads * self.size)
        self.key, self.value = (nn.Linear(context_dim or dim, groups * self.size) for _ in range(2))
        self.query_norm, self.key_norm = (HeadNorm(self.size, eps=qk_norm) if qk_norm else None for _ in range(2))
        self.out = nn.Linear(heads * self.size, dim)

    def start(self, batch: int, capacity: int) -> KeyValues:
        return kv_cache.empty(batch, self.groups, capacity, self.size, self.weight_like)

    def attend(
        self,
        x: Tensor,
        state: KeyValues | CachedContext | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, KeyValues | CachedContext | None]:
        q = self.query(x)
        check_width(q, self.heads * self.size)
        q = split(q, self.heads)
        if self.query_norm is not None:
            q = self.query_norm(q)
        if context is not None:
            state = self._project(context, context_mask)
        if isinstance(state, CachedContext):
            return self.read(q, state.view(), record), state
        k, v = self._keys(x)
        if self.rotary:
            at, _ = positions(x, state and state.length, mask=mask, segments=segments)
            turn = at, self.rotary, self.rotary_layout
            q, k = rotate(q, *turn), rotate(k, *turn)
        if (shards := active_shards()) is not None:
            view = CacheView(*shards.keys(k, v))
        elif state is None:
            view = kv_cache.within(k, v, causal=self.causal, mask=mask, segments=segments, prefix=prefix)
        else:
            view, state = kv_cache.extend(state, k, v, mask=mask, segments=segments, prefix=prefix, donate=donate)
        return self.read(q, view, record), state

    def _project(self, context: Tensor, mask: Tensor | None) -> CachedContext:
        if self.rotary:
            raise ValueError("rotary positions relate tokens of one sequence; context= needs rotary=0.0")
        return kv_cache.of_context(*self._keys(context), mask)

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B,G,N,D)."""
        k, v = split(self.key(x), self.groups), split(self.value(x), self.groups)
        return (k if self.key_norm is None else self.key_norm(k)), v

    def read(self, q: Tensor, view: CacheView, record: dict[str, Any] | None) -> Tensor:
        """Attend to what the view shows.

        Args:
            q: (B,H,N,D) queries.
            view: Keys, values and mask.
            record: Gets ``mask``, ``matrix`` and ``lse``, each O(N M), unless it is None.

        Returns:
            The output (B,N,dim), after the output projection.
        """
        q = q.to(view.keys.dtype)
        if record is not None:
            matrix, lse = dense.weights(q, view.keys, mask=view.mask, causal=view.causal)
            record.update(mask=view.allowed(q.shape[2]), matrix=matrix, lse=lse)
        dropout = self.dropout if self.training else 0.0
        o = dense.attend(q, view.keys, view.values, mask=view.mask, causal=view.causal, dropout=dropout)
        return self.out(merge(o))
