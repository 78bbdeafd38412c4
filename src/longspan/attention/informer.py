"""Informer (ProbSparse): softmax attention for active queries; the others read the mean of all values."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import rows
from ..ops.compress import probsparse
from ..ops.tensors import merge, positions, split, upcast_half, visible
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention


class InformerState(NamedTuple):
    """All keys and values so far, the measures of all queries, and the sum of all values."""

    past: KeyValues
    measures: Tensor  # (B,H,slots), in float32 or better
    total: Tensor  # (B,H,E), in float32 or better


class Informer(Attention[InformerState]):
    r"""Softmax attention of the queries with the most uneven scores; the others read the mean value.

    The measure $M_i$ of a query is the maximum minus the mean of its scores over $c \lceil \log L \rceil$ keys, at
    least one, sampled from L keys (natural logarithm). Active queries attend to all visible keys. Other queries read
    the mean of the visible values. The sampled keys depend on the layer and the positions only, in training and
    evaluation alike.

    Bidirectional: L = N, and the $c \lceil \log N \rceil$ queries of each head with the largest measures are active.
    Causal: L = i + 1, the keys up to the query, and a query is active if its measure is among the
    $c \lceil \log L \rceil$ largest so far. If measures come in random order, $\sum_{L=1}^N \min(1, \frac{c}{L} \lceil
    \log L \rceil)$ of N queries are active on average, which is 126 of 1024 with c = 5. Measures grow with the number
    of sampled keys, so that later queries are active more often: about 150 of 1024 random tokens.

    ``factor``: c, the factor of the number of sampled keys and active queries. ``published``: the causal form of the
    paper, which samples keys and chooses queries from the whole sequence, and leaks the future.

    In the published form, inactive queries read the sum of the values so far. With c = 5 and 64 random tokens, a change
    of later tokens changes 17 % of the earlier outputs with 1 head, 44 % with 4 and 60 % with 8. This form has no
    state.

    ``record`` gets the attention matrix, with uniform rows for inactive queries. The state is all keys and values, one
    number per query, and the sum of the values.

    Source: Zhou et al. 2021, section 3.1, eqs 3-5; stratified sampling and the causal form without a leak are specific
    to this library. Raises ValueError for factor < 1, for ``published`` without ``causal``, and for a state or a record
    of the published form.
    """

    name, paper, cost = "informer", "2012.07436", "N log^2 N D"
    family = "content"
    equations = (
        r"o_i = \sum_{j \in \mathcal{A}_i} p_{ij} v_j, \quad \text{active:} \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in \mathcal{A}_i} \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"\text{else} \quad p_{ij} = \frac{1}{\lvert \mathcal{A}_i \rvert}",
        r"M_i = \max_{j \in R_i} \frac{q_i \cdot k_j}{\sqrt D} - "
        r"\frac{1}{\lvert R_i \rvert} \sum_{j \in R_i} \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"R_i \text{ sampled from } \mathcal{A}_i",
    )
    citation = (
        "Zhou, Haoyi and Zhang, Shanghang and Peng, Jieqi and Zhang, Shuai and Li, Jianxin and Xiong, Hui and "
        "Zhang, Wancai",
        "Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting",
        2021,
    )
    examples = ("informer(factor=1)", "informer(factor=2)")
    joinable, states = False, (InformerState,)

    def __init__(
        self, dim: int, heads: int, *, causal: bool = True, layer: int = 0, factor: int = 5, published: bool = False
    ):
        super().__init__(dim, heads, causal=causal)
        if factor < 1:
            raise ValueError(f"factor={factor} must be at least 1: it scales the number of sampled keys")
        if published and not causal:
            raise ValueError(
                "published=True needs causal=True; the bidirectional form is that of the paper in any case"
            )
        self.layer, self.factor, self.published = layer, factor, published
        if published:
            self.states = ()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> InformerState:
        if self.published:
            raise ValueError("published=True needs whole sequences and has no state; published=False has one")
        past = kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)
        wide = upcast_half(self.weight_like.new_zeros(batch, self.heads, self.dim // self.heads))
        return InformerState(past, wide[..., :0].clone(), wide)

    def attend(
        self,
        x: Tensor,
        state: InformerState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, InformerState | None]:
        if record is not None:
            self._record(record, x, state, mask, segments)
        # In the published form causality does not hide padding at the end.
        hidden, wide = self.causal and not self.published, torch.cat([x, self.value(x)], -1)
        o, after = rows.map_sequences(self._run, wide, state, mask, segments, causal=hidden, width=self.dim)
        return self.out(o), after

    def _run(self, x: Tensor, state: InformerState | None, real: Tensor | None) -> tuple[Tensor, InformerState | None]:
        """Rows that start with their real tokens: inputs and values, concatenated (B,N,dim+H E) -> (B,N,H E)."""
        x, v = x[..., : self.dim], x[..., self.dim :]
        if not x.numel():
            return v, state
        o, after = self._read(x, split(v, self.heads), state, real)
        return merge(o), after

    def active(self, x: Tensor) -> Tensor:
        """Return which queries are active.

        Args:
            x: (B,N,dim) input, without masked tokens.

        Returns:
            (B,H,N) bool.
        """
        _, _, scores, at, tokens = self._scored(x, None, None)
        return self._active(scores, at, tokens, None, None)

    def _read(
        self, x: Tensor, v: Tensor, state: InformerState | None, real: Tensor | None
    ) -> tuple[Tensor, InformerState | None]:
        """The output of the heads in rows that start with their real tokens: x (B,N,dim), v (B,H,N,E) -> (B,H,N,E)."""
        lengths = None if real is None else real.sum(1)
        k, past = split(self.key(x), self.heads), state and state.past
        if past is not None:
            lengths = torch.full_like(past.length, x.shape[1]) if lengths is None else lengths
            after = kv_cache.extend(past, k, v, mask=real)[1]
            k, seen = after.keys, after.values
        else:
            after, seen = None, v
        q, k, scores, at, tokens = self._scored(x, k, past, lengths)
        active = self._active(scores, at, tokens, state and state.measures, past and past.length)
        q, v = q.to(k.dtype), upcast_half(v if real is None else v.masked_fill(~real[:, None, :, None], 0.0))
        if self.causal:
            fill = v.cumsum(2) if state is None else v.cumsum(2) + state.total[:, :, None]
            fill = fill if self.published else fill / (at + 1)[:, None, :, None]
        else:
            fill = (v.sum(2, keepdim=True) / tokens.clamp(min=1)[:, None, :1, None]).expand_as(v)
        limit = at + 1 if self.causal else tokens
        most = None if self.causal and not self.published else probsparse.most(x.shape[1], self.factor)
        o = probsparse.attend(q, k, seen, fill, active, limit, rows=most)
        if state is None or after is None:
            return o, None
        room = after.keys.shape[2]
        measures = F.pad(state.measures[..., :room], (0, max(room - state.measures.shape[-1], 0)))
        measures = measures.scatter(2, at[:, None].expand_as(scores), scores.to(measures.dtype))
        return o, InformerState(after, measures, state.total + v.sum(2))

    def _scored(
        self, x: Tensor, k: Tensor | None, past: KeyValues | None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, measures of the queries (B,H,N), their positions and numbers of visible keys (B|1,N)."""
        q = split(self.query(x), self.heads)
        k = split(self.key(x), self.heads) if k is None else k
        at, _ = positions(x if past is not None else x[:1], None if past is None else past.length)
        tokens = at + 1
        if self.published or not self.causal:
            tokens = torch.full_like(at, x.shape[1]) if lengths is None else lengths[:, None].expand(len(x), x.shape[1])
        if lengths is not None and len(at) == 1:
            at = at.expand(len(x), -1)
        scores = probsparse.measure(q, k, at, tokens, factor=self.factor, layer=self.layer)
        return q, k, scores, at, tokens

    def _active(self, scores: Tensor, at: Tensor, tokens: Tensor, past: Tensor | None, before: Tensor | None) -> Tensor:
        if self.published or not self.causal:
            return probsparse.among_all(scores, tokens[:, 0], self.factor)
        return probsparse.among_earlier(scores, at, past, before, self.factor)

    def _record(
        self,
        record: dict[str, Any],
        x: Tensor,
        state: InformerState | None,
        mask: Tensor | None,
        segments: Tensor | None,
    ) -> None:
        """Record the matrix (B,H,N,slots+N): the output of the heads for the unit vectors as values."""
        if self.published:
            raise ValueError("published=True has no attention matrix to record: its weights do not sum to 1")
        before = 0 if state is None else state.past.keys.shape[2]
        (batch, n, _), channels = x.shape, before + x.shape[1]
        each = torch.eye(channels, dtype=x.dtype, device=x.device)
        seen = visible(x, causal=self.causal, mask=mask, segments=segments)
        if state is not None:
            slots = torch.arange(channels, device=x.device) < state.past.length[:, None]
            values = each[:before].expand(batch, self.heads, -1, -1).to(state.past.values.dtype)
            total = slots[:, None].expand(-1, self.heads, -1).to(state.total.dtype)
            state = state._replace(past=state.past._replace(values=values), total=total)
            first = (
                torch.ones(batch, n, dtype=torch.bool, device=x.device)
                if segments is None
                else segments == segments[:, :1]
            )
            seen = torch.cat([(slots[:, None, :before] & first[..., None])[:, None], seen.expand(batch, 1, n, n)], -1)

        wide = torch.cat([x, each[before:].repeat(1, self.heads).expand(batch, -1, -1)], -1)
        matrix, _ = rows.split_packed(self._run, wide, state, mask, segments)
        record.update(matrix=split(matrix, self.heads), mask=seen)
