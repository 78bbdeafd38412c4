"""Compressive transformer: a memory of inputs, and a second memory of compressed older inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._utils.spec import known
from ..ops import rows
from ..ops.softmax import relative, scores, similarity
from ..ops.softmax.relative import Older
from ..ops.tensors import merge, split, upcast_half
from ..ops.token_runs import Runs, find, gone, left, newest, windows
from ..patterns.numbers import whole
from ..states import memory as memories
from ..states.memory import Memory, MemoryCall
from .base import Attention

POOLS = {"mean": "the mean of each channel", "max": "the maximum of each channel", "convolution": "a linear map"}


class CompressiveState(NamedTuple):
    """The memory of inputs, and the memory of compressed entries."""

    memory: Memory  # of m + c - 1 inputs
    entries: Tensor  # (B,k,dim), the newest in the last slot


class Compressive(Attention[CompressiveState]):
    r"""Softmax attention by content and distance over a memory whose old tokens are compressed.

    Tokens are grouped into runs of c from the beginning of the sequence. A run that lies more than m tokens before a
    query is one entry of the compressed memory. A query sees the last m to $m + c - 1$ tokens, and the k entries before
    them. So the output does not depend on how a sequence is split into calls; the paper compresses at the end of each
    segment. An entry counts as one token of distance. All else is as in ``transformer_xl``: with c = 1 and the mean,
    this is ``transformer_xl`` with a memory of m + k.

    ``memory``: m, the number of uncompressed tokens. ``compressed``: k, the number of compressed entries. ``rate``: c,
    the tokens per entry. ``pool``: mean, max or convolution (a linear map with kernel and stride c).
    ``stop_gradient``: whether to stop gradients through the state and the entries; without it, the task trains the
    convolution.

    ``record["penalty"]`` is the attention-reconstruction loss. A segment is m tokens of the call. The loss compares,
    by content alone, what queries read of the tokens that leave the memory within their segment with what they read of
    the compressed entries, as a mean squared difference. With ``stop_gradient`` the convolution learns from this loss
    alone, and the outputs give it gradients of zero.

    Source: Rae et al. 2020, section 3 and algorithms 1 and 2. Raises ValueError for an unknown pool, and for memory,
    compressed or rate below 1 or above 2^30 - 1.
    """

    name, paper, cost = "compressive", "1911.05507", "N (m + k) D"
    family = "compressed"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j + \sum_{r \in Q_i} p_{ir} W_v e_r, \quad "
        r"e_r = \mathrm{pool}(x_{rc}, \ldots, x_{rc + c - 1})",
        r"p_{ij} = \mathrm{softmax}_{P_i, Q_i} \frac{(q_i + u) \cdot k_j + (q_i + v) \cdot W_r r_{i-j}}{\sqrt D}, "
        r"\quad p_{ir}: k_r = W_k e_r \text{ at } i - R_i c + R_i - r",
        r"P_i = \lbrace j : R_i c \le j \le i \rbrace, \quad Q_i = \lbrace r : R_i - k \le r < R_i \rbrace, \quad "
        r"R_i = \max(0, \lfloor \frac{i - m}{c} \rfloor)",
    )
    citation = (
        "Rae, Jack W. and Potapenko, Anna and Jayakumar, Siddhant M. and Hillier, Chloe and Lillicrap, Timothy P.",
        "Compressive Transformers for Long-Range Sequence Modeling",
        2020,
    )
    examples = (
        "compressive(memory=1, compressed=3, rate=2, pool='convolution', stop_gradient=False)",
        "compressive(memory=4, compressed=2, rate=3, pool='max')",
    )
    directions, states, native_positions = ("causal",), (CompressiveState,), "relative"
    penalty = "the change of attention to old tokens by their compression"
    exempt = dict.fromkeys(
        ("gradients", "blocks"), "a state holds no gradient, so gradients end at the start of a call"
    ) | {"attention_matrix": "a compressed entry stands for several tokens, and its value is none of theirs"}
    no_decay = ("u", "v")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        memory: int = 512,
        compressed: int = 512,
        rate: int = 4,
        pool: str = "convolution",
        stop_gradient: bool = True,
    ):
        super().__init__(dim, heads, causal=causal)
        for option, value in (("memory", memory), ("compressed", compressed), ("rate", rate)):
            whole(option, value, 1)
        self.memory, self.compressed, self.rate = memory, compressed, rate
        self.pool, self.stop_gradient, self.slots = known(pool, POOLS, "pool"), stop_gradient, memory + rate - 1
        if not stop_gradient:
            self.exempt = {"attention_matrix": type(self).exempt["attention_matrix"]}
        self.query, self.key, self.value, self.distance, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.u, self.v = (nn.Parameter(0.02 * torch.randn(heads, dim // heads)) for _ in range(2))
        if pool == "convolution":
            self.compress = nn.Linear(rate * dim, dim)

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> CompressiveState:
        memory = memories.empty(batch, self.slots, self.dim, self.weight_like)
        return CompressiveState(memory, self.weight_like.new_zeros(batch, self.compressed, self.dim))

    def attend(
        self,
        x: Tensor,
        state: CompressiveState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, CompressiveState | None]:
        stop, memory = self.stop_gradient, None if state is None else state.memory
        call, query = memories.begin(x, memory, mask, segments, stop=stop), self.query(x)
        few = state is not None and x.shape[1] * self.heads < self.dim
        weights = memories.Weights(self.u, self.v, self.key, self.value, self.distance)
        view = memories.view(call, query, weights, clamp=0, few=few)
        k, v = (call.together(part, 2) for part in view.project(call.tokens))
        tokens = call.together(call.tokens)
        start = tokens.new_zeros(len(x), dtype=torch.long) if memory is None else memory.position
        slots, old = (0, 0) if state is None else (self.slots, self.compressed)
        runs = find(call.at, start, slots, memory=self.memory, size=self.rate, old=old)
        entries = self._pooled(tokens.detach() if stop else tokens, runs)
        if record and "penalty" in record:
            new = entries if stop else self._pooled(tokens.detach(), runs)
            record["penalty"] = self._lost(split(call.together(query), self.heads), tokens, new, runs, call)
        if stop:
            entries = entries.detach()
        if state is not None:
            earlier = state.entries.detach() if stop else state.entries
            entries = torch.cat([earlier.to(entries.dtype), entries], 1)
        far = call.at - gone(call.at, self.memory, self.rate) * self.rate
        past, size = self._past(call, runs, *view.project(entries)), self.dim // self.heads
        operands = relative.Operands(view.content, view.position, k, v, view.table, far, None, size**-0.5)
        o = relative.attend(operands, back=self.slots, older=past, farthest=self.slots + self.compressed)
        if state is not None:
            memory = memories.end(call, state.memory, segments, stop=stop)
            read = torch.full_like(start, x.shape[1]) if mask is None else mask.sum(1)
            kept = newest(entries, runs, start, memory.position, read, memory=self.memory)
            state = CompressiveState(memory, kept.to(state.entries.dtype))
        y = self.out(rows.scatter_back(mask, merge(view.after(o))))
        if stop and self.pool == "convolution":
            # The convolution learns from the penalty alone. Without the penalty it gets a gradient of zero, since
            # data-parallel training waits for a gradient of every parameter.
            y = y + torch.stack([(0 * p).sum() for p in self.compress.parameters()]).sum().to(y.dtype)
        return y, state

    def _pooled(self, tokens: Tensor, runs: Runs) -> Tensor:
        """The new entries (B,P,dim)."""
        x = windows(tokens, runs)
        match self.pool:
            case "mean":
                return x.mean(2)
            case "max":
                return x.amax(2)
            case _:
                return self.compress(x.flatten(2))

    def _past(self, call: MemoryCall, runs: Runs, k: Tensor, v: Tensor) -> Callable[[int, int], Older]:
        """The function from queries b to e - 1 to the entries that they see; k, v (B,G,k+P,.) of all entries."""

        def older(b: int, e: int) -> Older:
            # The visible entries grow by one every c tokens, unless documents begin in between.
            low = max(0, (b - self.memory) // self.rate - self.compressed + runs.old)
            part = slice(low, runs.old + e // self.rate + 1) if call.segments is None else slice(None)
            at, number, end = call.at[:, b:e, None], runs.number[:, None, part], runs.end[:, None, part]
            apart = runs.slots + torch.arange(b, e, device=at.device)[:, None] - end
            made = gone(at, self.memory, self.rate)
            # An entry of another document ends before the current document begins.
            seen = (apart > self.memory) & (apart <= at) & (number >= made - self.compressed)
            distance = at - made * self.rate + made - number
            return Older(k[:, :, part], v[:, :, part], distance.masked_fill(~seen, 0), seen)

        return older

    def _lost(self, q: Tensor, tokens: Tensor, entries: Tensor, runs: Runs, call: MemoryCall) -> Tensor:
        """The penalty: queries (B,H,N,D), tokens (B,S+N,dim), new entries (B,P,dim)."""
        q, tokens, n, slots = q.detach(), tokens.detach(), q.shape[2], runs.slots
        read = torch.full_like(runs.at[:, :1], n) if call.mask is None else call.mask.sum(1, keepdim=True)
        own = runs.end[:, runs.old :]
        index = torch.arange(slots + n, device=q.device)
        # For each token and each new entry, the segment in which the last token of its run leaves the memory.
        last = index + self.rate - 1 - runs.at % self.rate
        gone_in = [left(end, runs, read, memory=self.memory) for end in (last, own)]
        pairs = [split(_held(part, tokens), self.heads) for part in (self.key, self.value)]
        pairs += [split(_held(part, entries), self.heads) for part in (self.key, self.value)]
        total, count = entries.sum() * 0.0, 0
        for b in range(0, n, self.memory):
            e = min(b + self.memory, n)
            part = slice(max(0, slots + b - self.memory - self.rate + 1), max(0, slots + e - self.memory))
            place = slots + torch.arange(b, e, device=q.device)[:, None]
            at, real = call.at[:, b:e, None], place - slots < read[:, None]
            reads: list[Tensor] = []
            # An upper bound of the entries that leave within these tokens, unless documents begin in between.
            low, high = max(0, (b - self.memory) // self.rate), e // self.rate + 1
            few = slice(low, high) if call.segments is None else slice(None)
            for some, when, end, k, v in (
                (part, gone_in[0], index[None], *pairs[:2]),
                (few, gone_in[1], own, *pairs[2:]),
            ):
                k, v = k[:, :, some], v[:, :, some]
                allowed = (when[:, some] == b // self.memory)[:, None] & (place - end[:, None, some] <= at) & real
                reads.append(similarity.attend(scores.weights(scores.products(q[:, :, b:e], k), allowed[:, None]), v))
            total = total + upcast_half(reads[0].detach() - reads[1]).square().sum()
            count = count + allowed.any(-1).sum() * self.dim
        return total / torch.as_tensor(count, device=q.device).clamp(min=1)


def _held(part: nn.Module, x: Tensor) -> Tensor:
    """The output of a module without gradients to its weights."""
    return functional_call(part, {name: p.detach() for name, p in part.named_parameters()}, (x,))
