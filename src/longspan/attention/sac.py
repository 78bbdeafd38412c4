"""Softmax attention over a few edges, which a recurrent network picks and learns to pick by trial and reward."""

from functools import partial
from typing import ClassVar, NamedTuple

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
    """All tokens so far, and the memory of the network that picks."""

    past: KeyValues
    nodes: KeyValues  # one head, without values: by what each token is found
    hidden: Tensor  # (B,dim)
    cell: Tensor  # (B,dim)


class SparseAdaptive(Attention):
    r"""Each token reads itself and a few others, to which an LSTM has drawn edges; the LSTM learns from the reward.

    Causal: the LSTM reads the tokens; at token i its output h picks ``edges`` earlier ones, each with a query of its
    own, by a softmax over node states $n_j$ plus an encoding e of the distance. Bidirectional, as in the paper: it
    makes 2 N ``edges`` picks, each the LSTM's next input, by turns a query and the key that it reads; e is of the
    distance to the last pick, with its sign. The heads share the edges; one that is picked twice counts once.

    Training draws the picks, from torch's generator; evaluation takes the likeliest. They have no gradient: what trains
    the LSTM is ``record["log_prob"]`` (B,), the log of their probability, by way of ``longspan.ops.edges.reinforce``,
    whose example shows how; ``train`` does it with ``run.penalty`` = 1. Without, its gradients are 0. Scores are
    float32 at least.

    Attention costs O(N D) for each edge, but a pick looks at all nodes, one after the other: O(N^2), and N steps of the
    LSTM, 2 N ``edges`` if bidirectional, that cannot run side by side: slower than softmax attention. The state has
    every token.

    Source: Li et al. 2020, section 3. Its text leaves open, and here it is so: sizes (all are dim), the encoding (a
    learned vector for each power of two, times the query), the first input (learned), the baseline (the other rows'
    reward), one graph for all heads, arg-max in place of beam search. The causal form is ours; the paper's picks
    look at the whole input. Raises ValueError for edges < 1.
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
    exempt: ClassVar = {"bidirectional": "which edges there are is picked: the first token need not read the last one"}
    states, samples, apart = (SparseAdaptiveState,), True, True

    def __init__(self, dim: int, heads: int, *, causal: bool = True, edges: int = 4):
        super().__init__(dim, heads, causal=causal)
        if edges < 1:
            raise ValueError(f"edges={edges} is how many are drawn for each token; it must be at least 1")
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

    def start(self, batch, capacity):
        like, wide = self.weight_like, upcast_half(self.weight_like)
        past = kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, like)
        nodes = kv_cache.empty(batch, 1, capacity, self.dim, wide)
        memory = wide.new_zeros(batch, self.dim)
        return SparseAdaptiveState(past, nodes._replace(values=nodes.values[..., :0]), memory, memory.clone())

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        if not x.numel():
            return self.out(x), state
        told, size = {} if record is None else record, self.dim // self.heads
        v = split(self.value(x), self.heads)
        tell, learn = "matrix" in told, "log_prob" in told
        if tell:
            # What is read is linear in the values: of unit vectors, one per column, it is the matrix.
            kept = 0 if state is None else state.past.keys.shape[2]
            units = torch.eye(kept + x.shape[1], dtype=v.dtype, device=x.device).expand(*v.shape[:2], -1, -1)
            v = torch.cat([v, units[:, :, kept:]], -1)
            if state is not None:
                values = torch.cat([state.past.values, units[:, :, :kept].to(state.past.values.dtype)], -1)
                state = state._replace(past=state.past._replace(values=values))
        run = partial(self._run, learn=learn, tell=tell, donate=donate and segments is None and not tell)
        both = torch.cat([x, merge(v).to(x.dtype)], -1)
        found, state = rows.split_packed(run, both, state, mask, segments)
        o, logs, seen = found.tensor_split([v.shape[1] * v.shape[-1], v.shape[1] * v.shape[-1] + 1], -1)
        o = split(o, self.heads)
        if tell:
            told.update(matrix=o[..., size:], mask=seen[:, None] > 0)
            if state is not None:
                state = state._replace(past=state.past._replace(values=state.past.values[..., :size].clone()))
        if learn:
            told["log_prob"] = logs.sum((1, 2))
        # Parameters without a gradient would keep data-parallel training waiting.
        nothing = sum((0 * upcast_half(p)).sum() for p in self.predictor.parameters())
        return self.out((merge(o[..., :size]) + nothing).to(x.dtype)), state

    def _run(self, both, state, real, *, learn, tell, donate):
        """x beside v (B,N,dim + H*E) -> what is read, the logs of the picks' probabilities, and who is seen."""
        x, v = both.tensor_split([self.dim], -1)
        q, k, v = split(self.query(x), self.heads), split(self.key(x), self.heads), split(v, self.heads)
        with torch.autocast(x.device.type, enabled=False):
            picks = self._past if self.causal else self._whole
            o, logs, seen, state = picks(
                upcast_half(x), q, k, v, state, real, learn and torch.is_grad_enabled(), donate
            )
            logs = logs if real is None else logs.masked_fill(~real, 0.0)
            o = merge(o)
            parts = [o, logs[..., None].to(o.dtype), *([seen.to(o.dtype)] if tell else [])]
        return torch.cat(parts, -1), state

    def _past(self, x, q, k, v, state, real, learn, donate):
        start = x.new_zeros(len(x), dtype=torch.long) if state is None else state.past.length
        with torch.set_grad_enabled(learn):
            nodes = self._linear("node", x)
            memory = (x.new_zeros(x.shape[0], self.dim),) * 2 if state is None else (state.hidden, state.cell)
            hidden, memory = lstm.run(self._linear("read", x), self._recur, memory, real)
        if state is not None:
            view, past = kv_cache.extend(state.past, k, v, mask=real, donate=donate)
            found, kept = kv_cache.extend(state.nodes, nodes[:, None], nodes[:, None, :, :0], mask=real, donate=donate)
            k, v, nodes = view.keys, view.values, found.keys[:, 0]
            state = SparseAdaptiveState(past, kept, *memory)
        at = start[:, None] + torch.arange(x.shape[1], device=x.device)
        distance = at[:, :, None] - torch.arange(k.shape[2], device=x.device)  # (B,N,M)
        with torch.set_grad_enabled(learn):
            asks = self._linear("ask", hidden).unflatten(-1, (self.edges, -1))  # (B,N,edges,dim)
            far = op.level(distance.clamp(min=1))[:, :, None].expand(-1, -1, self.edges, -1)
            scores = (asks.flatten(1, 2) @ nodes.mT).unflatten(1, asks.shape[1:3])
            scores = scores + self._linear("distance", asks).gather(-1, far)
            index, logs = op.pick(scores * self.dim**-0.5, (distance > 0)[:, :, None], self.training)
        index = torch.cat([at[..., None].clamp(max=k.shape[2] - 1), index], -1)
        there = (at[..., None] > 0) | (torch.arange(1 + self.edges, device=x.device) == 0)
        seen = op.mask_of(index, there, k.shape[2]).to(v.dtype) @ v[:, 0, :, self.dim // self.heads :]
        return op.attend(q, k, v, index, there), logs.sum(-1), seen, state

    def _whole(self, x, q, k, v, state, real, learn, donate):
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

    def _walk(self, x, real):
        """Nodes (B,T), query and key by turns, and the log of the probability of all of a row (B,)."""
        nodes, reads = self._linear("node", x), self._linear("read", x)
        first = self._linear("begin", x.new_ones(len(x), 1))
        memory, gates = (torch.zeros_like(first), torch.zeros_like(first)), self._linear("read", first)
        last, picked, logs = None, [], first.new_zeros(len(x))
        turns = 2 * self.edges * real.sum(1)
        tokens, row = torch.arange(x.shape[1], device=x.device), torch.arange(len(x), device=x.device)
        for turn in range(2 * self.edges * x.shape[1]):
            memory = lstm.step(gates, self._recur, memory)
            ask = self._linear("ask", memory[0])
            scores = (nodes @ ask[..., None])[..., 0]
            if last is not None:
                far = tokens - last[:, None]
                kind = far.sign() * (1 + op.level(far.abs().clamp(min=1))) + op.LEVELS
                scores = scores + self._linear("distance", ask).gather(-1, kind)
            last, log = op.pick(scores * self.dim**-0.5, real, self.training)
            logs, gates = logs + log.masked_fill(turn >= turns, 0.0), reads[row, last]
            picked.append(last)
        return torch.stack(picked, 1), logs

    def _linear(self, name, x):
        """A layer of the predictor, in float32 at least."""
        weight, bias = linear_numbers(self.predictor[name])
        return F.linear(x, upcast_half(weight), None if bias is None else upcast_half(bias))

    @property
    def _recur(self) -> Tensor:
        return upcast_half(linear_numbers(self.predictor["recur"])[0])
