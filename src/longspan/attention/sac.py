"""Softmax attention over a few edges per token, which a recurrent network selects and learns by reward."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.init import linear_numbers
from ..ops import edges as op
from ..ops import lstm, rows
from ..ops.softmax import dense
from ..ops.tensors import merge, split, upcast_half
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention


class SparseAdaptiveState(NamedTuple):
    """All tokens so far, and the memory of the network that selects edges."""

    past: KeyValues
    nodes: KeyValues  # node states: one head, without values
    hidden: Tensor  # (B,dim)
    cell: Tensor  # (B,dim)


class _Part(NamedTuple):
    """Tokens of one packed sequence, after a state."""

    x: Tensor  # (B,N,dim)
    q: Tensor  # (B,H,N,D)
    k: Tensor  # (B,H,N,D)
    v: Tensor  # (B,H,N,E)
    state: SparseAdaptiveState | None
    real: Tensor | None  # (B,N)
    learn: bool
    donate: bool


class SparseAdaptive(Attention[SparseAdaptiveState]):
    """Each token reads itself and a few other tokens, which an LSTM selects; the LSTM learns by reward.

    In the causal form the LSTM reads the tokens. At token i its output h selects ``edges`` earlier tokens, each with a
    separate query, by a softmax over node states $n_j$ plus an encoding e of the distance. The bidirectional form
    follows the paper: the LSTM makes 2 N ``edges`` selections, alternately a query and the key that it reads, and each
    selection is the LSTM's next input. There e encodes the signed distance to the last selection. The heads share the
    edges. An edge that is selected twice counts once.

    In training the edges are sampled with torch's generator; in evaluation each is the most likely one. Edges have no
    gradient. The LSTM learns from ``record["log_prob"]`` (B,), the log of their probability, with
    ``longspan.ops.edges.reinforce``, whose example shows how; ``train`` does it with ``run.penalty`` = 1. Otherwise the
    LSTM's gradients are 0. Scores are float32 or wider.

    Attention costs O(N D) per edge, but each selection scores all nodes: O(N^2). The LSTM also takes N sequential
    steps, or 2 N ``edges`` if bidirectional. It is therefore slower than softmax attention. The state has every token.

    ``edges``: edges per token, besides the one to itself.

    Source: Li et al. 2020, section 3. The paper leaves these points open: sizes (here all are dim), the encoding (here
    a learned vector for each power of two, times the query), the first input (here learned), the baseline (here the
    reward of the other rows), one graph for all heads, and arg-max in place of beam search. The causal form is ours;
    the paper's selections see the whole input.

    Raises:
        ValueError: For edges < 1.
    """

    name, paper, cost = "sac", "2003.09833", "N^2 D"
    family = "content"
    equations = (
        r"o_i = \sum_{j \in \mathcal{E}_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in \mathcal{E}_i} \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"\mathcal{E}_i = \lbrace i, j_1, j_2, \ldots \rbrace",
        r"j_m \sim \mathrm{softmax}_{j < i} \frac{W_m h_i \cdot (n_j + e_{i-j})}{\sqrt{\mathrm{dim}}}, \quad "
        r"h_i = \mathrm{LSTM}(x_i, h_{i-1}), \quad n_j = W_n x_j",
    )
    citation = (
        "Li, Xiaoya and Meng, Yuxian and Zhou, Mingxin and Han, Qinghong and Wu, Fei and Li, Jiwei",
        "SAC: Accelerating and Structuring Self-Attention via Sparse Adaptive Connection",
        2020,
    )
    examples = ("sac(edges=2)",)
    exempt: Mapping[str, str] = {"bidirectional": "edges are selected, so the first token may not read the last one"}
    states, samples, apart = (SparseAdaptiveState,), True, True

    def __init__(self, dim: int, heads: int, *, causal: bool = True, edges: int = 4):
        super().__init__(dim, heads, causal=causal)
        if edges < 1:
            raise ValueError(f"edges={edges} is the number of edges per token and must be at least 1")
        self.edges = edges
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        sizes = {"read": 4 * dim, "node": dim, "ask": edges * dim if causal else dim}
        self.predictor = nn.ModuleDict({name: nn.Linear(dim, size) for name, size in sizes.items()})
        self.predictor["recur"] = nn.Linear(dim, 4 * dim, bias=False)
        self.predictor["distance"] = nn.Linear(dim, op.LEVELS if causal else 2 * op.LEVELS + 1, bias=False)
        if not causal:
            self.predictor["begin"] = nn.Linear(1, dim, bias=False)

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> SparseAdaptiveState:
        like, wide = self.weight_like, upcast_half(self.weight_like)
        past = kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, like)
        nodes = kv_cache.empty(batch, 1, capacity, self.dim, wide)
        memory = wide.new_zeros(batch, self.dim)
        return SparseAdaptiveState(past, nodes._replace(values=nodes.values[..., :0]), memory, memory.clone())

    def attend(
        self,
        x: Tensor,
        state: SparseAdaptiveState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, SparseAdaptiveState | None]:
        if not x.numel():
            return self.out(x), state
        wanted = {} if record is None else record
        size = self.dim // self.heads
        v = split(self.value(x), self.heads)
        matrix, learn = "matrix" in wanted, "log_prob" in wanted
        if matrix:
            # The output is linear in the values, so the output for unit vectors, one per column, is the matrix.
            kept = 0 if state is None else state.past.keys.shape[2]
            units = torch.eye(kept + x.shape[1], dtype=v.dtype, device=x.device).expand(*v.shape[:2], -1, -1)
            v = torch.cat([v, units[:, :, kept:]], -1)
            if state is not None:
                values = torch.cat([state.past.values, units[:, :, :kept].to(state.past.values.dtype)], -1)
                state = state._replace(past=state.past._replace(values=values))
        run = partial(self._run, learn=learn, matrix=matrix, donate=donate and segments is None and not matrix)
        both = torch.cat([x, merge(v).to(x.dtype)], -1)
        found, state = rows.split_packed(run, both, state, mask, segments)
        o, logs, seen = found.tensor_split([v.shape[1] * v.shape[-1], v.shape[1] * v.shape[-1] + 1], -1)
        o = split(o, self.heads)
        if matrix:
            wanted.update(matrix=o[..., size:], mask=seen[:, None] > 0)
            if state is not None:
                state = state._replace(past=state.past._replace(values=state.past.values[..., :size].clone()))
        if learn:
            wanted["log_prob"] = logs.sum((1, 2))
        # Data-parallel training waits for a gradient of every parameter.
        nothing = sum((0 * upcast_half(p)).sum() for p in self.predictor.parameters())
        return self.out((merge(o[..., :size]) + nothing).to(x.dtype)), state

    def _run(
        self,
        both: Tensor,
        state: SparseAdaptiveState | None,
        real: Tensor | None,
        *,
        learn: bool,
        matrix: bool,
        donate: bool,
    ) -> tuple[Tensor, SparseAdaptiveState | None]:
        """x and v (B,N,dim + H*E) -> output, logs of the selections' probabilities and visible columns; the state."""
        x, v = both.tensor_split([self.dim], -1)
        q, k, v = split(self.query(x), self.heads), split(self.key(x), self.heads), split(v, self.heads)
        with torch.autocast(x.device.type, enabled=False):
            picks = self._past if self.causal else self._whole
            part = _Part(upcast_half(x), q, k, v, state, real, learn and torch.is_grad_enabled(), donate)
            o, logs, seen, state = picks(part)
            logs = logs if real is None else logs.masked_fill(~real, 0.0)
            o = merge(o)
            parts = [o, logs[..., None].to(o.dtype), *([seen.to(o.dtype)] if matrix else [])]
        return torch.cat(parts, -1), state

    def _past(self, part: _Part) -> tuple[Tensor, Tensor, Tensor, SparseAdaptiveState | None]:
        x, q, k, v, state, real, learn, donate = part
        start = x.new_zeros(len(x), dtype=torch.long) if state is None else state.past.length
        with torch.set_grad_enabled(learn):
            nodes = self._linear("node", x)
            zeros = x.new_zeros(x.shape[0], self.dim)
            memory = (zeros, zeros) if state is None else (state.hidden, state.cell)
            hidden, memory = lstm.run(self._linear("read", x), self._recur, memory, real)
        if state is not None:
            view, past = kv_cache.extend(state.past, k, v, mask=real, donate=donate)
            found, kept = kv_cache.extend(state.nodes, nodes[:, None], nodes[:, None, :, :0], mask=real, donate=donate)
            k, v, nodes = view.keys, view.values, found.keys[:, 0]
            state = SparseAdaptiveState(past, kept, *memory)
        at = start[:, None] + torch.arange(x.shape[1], device=x.device)
        distance = at[:, :, None] - torch.arange(k.shape[2], device=x.device)  # (B,N,M)
        with torch.set_grad_enabled(learn):
            queries = self._linear("ask", hidden).unflatten(-1, (self.edges, -1))  # (B,N,edges,dim)
            far = op.level(distance.clamp(min=1))[:, :, None].expand(-1, -1, self.edges, -1)
            scores = (queries.flatten(1, 2) @ nodes.mT).unflatten(1, queries.shape[1:3])
            scores = scores + self._linear("distance", queries).gather(-1, far)
            index, logs = op.pick(scores * self.dim**-0.5, (distance > 0)[:, :, None], self.training)
        index = torch.cat([at[..., None].clamp(max=k.shape[2] - 1), index], -1)
        there = (at[..., None] > 0) | (torch.arange(1 + self.edges, device=x.device) == 0)
        seen = op.mask_of(index, there, k.shape[2]).to(v.dtype) @ v[:, 0, :, self.dim // self.heads :]
        return op.attend(q, k, v, index, there), logs.sum(-1), seen, state

    def _whole(self, part: _Part) -> tuple[Tensor, Tensor, Tensor, SparseAdaptiveState | None]:
        x, q, k, v, state, real, learn, _ = part
        batch, n = x.shape[:2]
        real = torch.ones(batch, n, dtype=torch.bool, device=x.device) if real is None else real
        with torch.set_grad_enabled(learn):
            picked, logs = self._walk(x, real)
        chosen = torch.arange(picked.shape[1] // 2, device=x.device) < self.edges * real.sum(1, keepdim=True)
        pairs = picked[:, ::2] * n + picked[:, 1::2]
        seen = op.mask_of(pairs[:, None], chosen[:, None], n * n).view(batch, n, n)
        seen = seen | torch.eye(n, dtype=torch.bool, device=x.device)
        o = dense.attend(upcast_half(q), upcast_half(k), upcast_half(v), mask=seen[:, None])
        columns = seen.to(v.dtype) @ v[:, 0, :, self.dim // self.heads :]
        return o, F.pad(logs[:, None], (0, n - 1)), columns, state

    def _walk(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Selected nodes (B,T), query and key alternately, and the log of their probability (B,)."""
        nodes, reads = self._linear("node", x), self._linear("read", x)
        first = self._linear("begin", x.new_ones(len(x), 1))
        memory, gates = (torch.zeros_like(first), torch.zeros_like(first)), self._linear("read", first)
        last, picked, logs = None, [], first.new_zeros(len(x))
        turns = 2 * self.edges * real.sum(1)
        tokens, row = torch.arange(x.shape[1], device=x.device), torch.arange(len(x), device=x.device)
        for turn in range(2 * self.edges * x.shape[1]):
            memory = lstm.step(gates, self._recur, memory)
            query = self._linear("ask", memory[0])
            scores = (nodes @ query[..., None])[..., 0]
            if last is not None:
                far = tokens - last[:, None]
                kind = far.sign() * (1 + op.level(far.abs().clamp(min=1))) + op.LEVELS
                scores = scores + self._linear("distance", query).gather(-1, kind)
            last, log = op.pick(scores * self.dim**-0.5, real, self.training)
            logs, gates = logs + log.masked_fill(turn >= turns, 0.0), reads[row, last]
            picked.append(last)
        return torch.stack(picked, 1), logs

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """A layer of the LSTM or its scores, in float32 or wider."""
        weight, bias = linear_numbers(self.predictor[name])
        return F.linear(x, upcast_half(weight), None if bias is None else upcast_half(bias))

    @property
    def _recur(self) -> Tensor:
        return upcast_half(linear_numbers(self.predictor["recur"])[0])
