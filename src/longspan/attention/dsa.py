"""DeepSeek sparse attention: a small indexer scores all tokens, and the heads read the best ones."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..modules.rotary import check_rotary, rotate
from ..ops.compress import select
from ..ops.softmax import scores, similarity
from ..ops.softmax.dense import repeat
from ..ops.sparse import chosen, picked
from ..ops.tensors import merge, positions, split, upcast_half
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .cached import Cached, check_least


class DSAState(NamedTuple):
    """All tokens so far, and the keys by which the indexer scores them."""

    past: KeyValues
    # Its keys are (B,1,capacity,index_dim); its values have no channels.
    index: KeyValues  # pyright: ignore[reportIncompatibleMethodOverride] (no state is searched as a tuple)


class Loss(NamedTuple):
    """The sum of a loss over some tokens, and their number."""

    total: Tensor
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] (a field hides tuple.count)


class DSA(Cached[DSAState]):
    r"""Softmax over the k tokens with the largest scores of a small indexer, the same tokens for all heads.

    The indexer has J small heads that share their keys. It scores all pairs, in O(N^2) with a small factor, and among
    equal scores the first tokens win. The choice has no gradient, and the indexer reads its input without one: it
    learns from ``record["penalty"]`` alone, the divergence of its scores, as a softmax over the chosen tokens, from the
    mean weights of all heads there.

    ``keys``: k, tokens per query. ``index_heads``: J. ``index_dim``: channels of a head of the indexer. ``kv_heads``:
    heads of keys and values, each shared by heads / kv_heads query heads (0: as many as heads). ``rotary``: base of
    rotary positions, of the indexer too (0: none). ``rotary_layout``: halves or interleaved.

    The state is all keys and values, and the keys of the indexer.

    Source: DeepSeek-AI 2025, section 2.1, eqs. 1 to 4; the loss of its sparse stage.

    Raises:
        ValueError: For sizes below 1, ``kv_heads`` that do not divide heads, or rotary positions that do not fit the
            head dimension or ``index_dim``.
    """

    name, paper, cost = "dsa", "2512.02556", "N^2 J + N k D"
    family = "content"
    equations = (
        r"o_i = \sum_{s \in S_i} p_{is} v_s, \quad p_{is} = \mathrm{softmax}_{s \in S_i} \frac{q_i \cdot k_s}{\sqrt D}",
        r"S_i = \lbrace s \le i : I_{is} \text{ is among the } k \text{ largest} \rbrace",
        r"I_{is} = \frac{1}{\sqrt{J D_I}} \sum_{j = 1}^J w_{ij} \, \mathrm{relu}(a_{ij} \cdot b_s), \quad "
        r"a_{ij} = A_j x_i, \quad b_s = \mathrm{norm}(B x_s), \quad w_i = W_I x_i",
    )
    citation = (
        "{DeepSeek-AI}",
        "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
        2025,
    )
    examples = (
        "dsa(keys=5, index_heads=2, index_dim=4)",
        "dsa(keys=3, index_heads=1, index_dim=2, kv_heads=1, rotary=100.0)",
    )
    states = (DSAState,)
    exempt = {"gradients": "the indexer has gradients from its penalty alone, as the paper trains it"}  # noqa: RUF012
    penalty = "the divergence of the indexer's scores from the weights of the heads"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        keys: int = 256,
        index_heads: int = 4,
        index_dim: int = 32,
        kv_heads: int = 0,
        rotary: float = 0.0,
        rotary_layout: str = "halves",
    ):
        super().__init__(dim, heads, causal=causal)
        check_least(keys=keys, index_heads=index_heads, index_dim=index_dim)
        self.create(kv_heads, rotary, rotary_layout)
        check_rotary(rotary, rotary_layout, index_dim)
        self.keys, self.index_heads, self.index_dim = keys, index_heads, index_dim
        self.index_query = nn.Linear(dim, index_heads * index_dim, bias=False)
        self.index_key = nn.Linear(dim, index_dim, bias=False)
        self.index_norm = nn.LayerNorm(index_dim)
        self.index_weight = nn.Linear(dim, index_heads, bias=False)

    def start(self, batch: int, capacity: int) -> DSAState:
        past = kv_cache.empty(batch, self.groups, capacity, self.dim // self.heads, self.weight_like)
        index = kv_cache.empty(batch, 1, capacity, self.index_dim, self.weight_like)
        return DSAState(past, index._replace(values=index.values[..., :0]))

    def attend(
        self,
        x: Tensor,
        state: DSAState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, DSAState | None]:
        if record is not None and "matrix" in record:
            return self._recorded(x, state, mask, segments, record, donate)
        losses: list[Loss] | None = [] if record is not None and "penalty" in record else None
        run = functools.partial(self._run, losses=losses)
        y, state = self.by_sequences(run, x, state, mask, segments, donate, exact=losses is not None)
        if losses is not None and record is not None:
            total = sum((loss.total for loss in losses), x.new_zeros(()))
            record["penalty"] = total / max(1, sum(loss.count for loss in losses))
        return y, state

    def _run(
        self, x: Tensor, state: DSAState | None, real: Tensor | None, donate: bool, losses: list[Loss] | None = None
    ) -> tuple[Tensor, DSAState | None]:
        at, _ = positions(x, state and state.past.length)
        (q, k, v), (asks, offers, weights) = self._projected(x, at, real)
        keys, values, past, index = k, v, None, None
        if state is not None:
            view, past = kv_cache.extend(state.past, k, v, mask=real, donate=donate)
            found, index = kv_cache.extend(state.index, offers, offers[..., :0], mask=real, donate=donate)
            keys, values, offers = view.keys, view.values, found.keys
        q, asks, offers = q.to(keys.dtype), asks.transpose(1, 2), offers[:, 0]
        picks = picked.choose(asks, offers, weights, at, self.keys)
        if losses is not None:
            real = torch.ones_like(at, dtype=torch.bool) if real is None else real
            losses.append(self._loss(asks, offers, weights, picks, picked.weights(q, keys, at, picks), real))
        o = chosen.attend(q, keys, values, at, picks[:, None], 1)
        return self.out(merge(o)), None if past is None or index is None else DSAState(past, index)

    def _projected(
        self, x: Tensor, at: Tensor, real: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """What the heads read; and of the indexer queries (B,J,N,D_I), keys (B,1,N,D_I), weights of heads (B,N,J)."""
        heads, x = self.heads_of(x, at, real), x.detach()
        asks, offers = split(self.index_query(x), self.index_heads), self.index_norm(self.index_key(x))[:, None]
        if self.rotary:
            asks, offers = (rotate(t, at, self.rotary, self.rotary_layout) for t in (asks, offers))
        return heads, (asks, offers, self.index_weight(x) * (self.index_heads * self.index_dim) ** -0.5)

    def _recorded(
        self,
        x: Tensor,
        state: DSAState | None,
        mask: Tensor | None,
        segments: Tensor | None,
        record: dict[str, Any],
        donate: bool,
    ) -> tuple[Tensor, DSAState | None]:
        """The same from the matrix of all pairs, which ``record`` gets."""
        at, _ = positions(x, state and state.past.length, mask=mask, segments=segments)
        (q, k, v), (asks, offers, weights) = self._projected(x, at, mask)
        given: kv_cache.Visible = {"mask": mask, "segments": segments}
        view, past = kv_cache.continued(k, v, state and state.past, causal=True, donate=donate, **given)
        stored = offers, offers[..., :0]
        found, index = kv_cache.continued(*stored, state and state.index, causal=True, donate=donate, **given)
        fits = torch.einsum("bjns,bnj->bns", (asks @ found.keys.to(asks.dtype).mT).relu(), weights)[:, None]
        seen = select.largest(upcast_half(fits), view.allowed(x.shape[1]), self.keys)
        p = scores.weights(scores.products(q, repeat(view.keys, self.heads)), seen)
        if "penalty" in record:
            real = torch.ones_like(at, dtype=torch.bool) if mask is None else mask
            record["penalty"] = divergence(fits[:, 0], seen[:, 0], p.detach().sum(1), real) / max(1, int(real.sum()))
        record.update(matrix=p, mask=seen)
        o = self.out(merge(similarity.attend(p, repeat(view.values, self.heads))))
        return o, None if past is None or index is None else DSAState(past, index)

    def _loss(self, asks: Tensor, offers: Tensor, weights: Tensor, picks: Tensor, wanted: Tensor, real: Tensor) -> Loss:
        """The divergence from the weights that the heads give to the chosen tokens, wanted (B,N,S)."""
        total, count = asks.new_zeros(()), int(real.sum())
        size = max(1, picked.GATHERED // max(1, len(asks) * picks.shape[2] * self.index_dim))
        for start in range(0, asks.shape[1], size):
            part = slice(start, start + size)
            given = asks[:, part], offers, weights[:, part], picks[:, part], wanted[:, part], real[:, part]
            total = total + checkpoint(_divergence, *given, use_reentrant=False)
        return Loss(total, count)


def _divergence(asks: Tensor, offers: Tensor, weights: Tensor, picks: Tensor, wanted: Tensor, real: Tensor) -> Tensor:
    keys = picked.gathered(offers[:, None], picks)[:, 0]
    fits = torch.einsum("bnjs,bnj->bns", torch.einsum("bnjd,bnsd->bnjs", asks, keys).relu(), weights)
    return divergence(fits, picks >= 0, wanted, real)


def divergence(fits: Tensor, chosen: Tensor, wanted: Tensor, real: Tensor) -> Tensor:
    """Sum over real queries the divergence of the softmax of chosen scores (B,N,S) from the wanted weights (B,N,S)."""
    there = chosen & real[..., None]
    given = upcast_half(fits).masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~there, 0.0)
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=torch.finfo(wanted.dtype).tiny)
    return (torch.special.xlogy(wanted, wanted) - wanted * given).masked_fill(~there, 0.0).sum()
