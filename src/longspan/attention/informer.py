"""Softmax attention for the few queries that need it; the others read the mean of all values."""

from typing import NamedTuple

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
    measures: Tensor  # (B,H,slots), float32 at least
    total: Tensor  # (B,H,E), float32 at least


class Informer(Attention):
    r"""Softmax for the queries whose scores are the least even, as a few sampled keys tell; others read a mean.

    The measure $M_i$ of a query is the largest of its scores less their mean, over $c \lceil \log L \rceil$ sampled
    keys of L (a natural logarithm), at least one. Active queries attend to all keys that they may see, the others read
    the mean of these values. Which keys are sampled depends on the layer and the positions alone, the same in training
    and evaluation.

    Bidirectional: the $c \lceil \log N \rceil$ queries of a head with the largest measures are active, and L = N.
    Causal: the keys are the L = i + 1 up to the query's own, and it is active if its measure is among the
    $c \lceil \log L \rceil$ largest up to its own. Of N queries whose measures come in random order
    $\sum_{L=1}^N \min(1, \frac{c}{L} \lceil \log L \rceil)$ are active on average, which is 126 of 1024 with c = 5.
    Measures grow with the number of sampled keys, so that later queries have the larger ones and more are active: of
    1024 random tokens about 150.

    ``factor``: c. ``published``: the causal form of the paper, where keys are sampled and queries chosen from the whole
    sequence, and the others read the sum of the values up to their own. It LEAKS the future: with c = 5 and 64 random
    tokens of which the later ones change, 17 % of the outputs before these change with 1 head, 44 % with 4 and 60 %
    with 8. It has no state.

    ``record`` gets the attention matrix, whose rows are even for queries that are not active. The state is all keys and
    values, one number for each query, and the values' sum.

    Source: Zhou et al. 2021, section 3.1, eqs 3-5; sampling by strata and the causal form without a leak are our own.
    Raises ValueError for factor < 1, for ``published`` without ``causal``, and for a state or a record of that form.
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
    states = (InformerState,)

    def __init__(
        self, dim: int, heads: int, *, causal: bool = True, layer: int = 0, factor: int = 5, published: bool = False
    ):
        super().__init__(dim, heads, causal=causal)
        if factor < 1:
            raise ValueError(f"factor={factor} times the logarithm of the length is sampled, so factor >= 1")
        if published and not causal:
            raise ValueError(
                "published=True is a form of causal=True; the bidirectional one is the paper's in any case"
            )
        self.layer, self.factor, self.published = layer, factor, published
        if published:
            self.states = ()  # type: ignore[misc]
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch, capacity):
        if self.published:
            raise ValueError("published=True chooses from whole sequences, so it has no state; published=False has one")
        past = kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)
        wide = upcast_half(self.weight_like.new_zeros(batch, self.heads, self.dim // self.heads))
        return InformerState(past, wide[..., :0].clone(), wide)

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        if record is not None:
            self._record(record, x, state, mask, segments)
        # In the published form, a pad at the end is not hidden by causality.
        hidden, wide = self.causal and not self.published, torch.cat([x, self.value(x)], -1)
        o, after = rows.map_sequences(self._run, wide, state, mask, segments, causal=hidden, width=self.dim)
        return self.out(o), after

    def _run(self, x, state, real):
        """Rows that begin with their real tokens: inputs beside values (B,N,dim+H E) -> (B,N,H E)."""
        x, v = x[..., : self.dim], x[..., self.dim :]
        if not x.numel():
            return v, state
        o, after = self._read(x, split(v, self.heads), state, real)
        return merge(o), after

    def active(self, x: Tensor) -> Tensor:
        """Which queries attend: x (B,N,dim), of real tokens -> bool (B,H,N)."""
        return self._active(*self._scored(x, None, None)[2:], None, None)

    def _read(self, x, v, state, real):
        """What the heads read in rows that begin with their real tokens: x (B,N,dim), v (B,H,N,E) -> (B,H,N,E)."""
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

    def _scored(self, x, k, past, lengths=None):
        """q, keys, the measures of the queries (B,H,N), their positions, and from how many keys each draws (B|1,N)."""
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

    def _active(self, scores, at, tokens, past, before):
        if self.published or not self.causal:
            return probsparse.among_all(scores, tokens[:, 0], self.factor)
        return probsparse.among_earlier(scores, at, past, before, self.factor)

    def _record(self, record, x, state, mask, segments):
        """The matrix is what the heads read where every token's value is a channel of its own: (B,H,N,slots+N)."""
        if self.published:
            raise ValueError("published=True adds values up without weights that sum to 1, so record= has no matrix")
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
