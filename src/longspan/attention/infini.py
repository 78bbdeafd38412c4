"""Infini-attention: softmax within segments, and a linear-attention memory of all earlier segments."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import rows
from ..ops.linear import segmented
from ..ops.softmax import dense
from ..ops.tensors import merge, split, upcast_half
from ..states.counters import check_counts
from .base import Attention


class InfiniState(NamedTuple):
    """The memory, and the tokens of the current segment. Sums are in float32 or better."""

    sums: Tensor  # (B,H,D,D+1) the memory of complete segments; the last column is the normalizer
    recent: Tensor  # (B,H,D,D+1) the contribution of the current segment
    keys: Tensor  # (B,H,s-1,D) keys of the current segment, the first in the first slot
    values: Tensor  # (B,H,s-1,D)
    position: Tensor  # (B,) int64, real tokens so far


class _Step(NamedTuple):
    """Tokens after a state: their queries, keys and values, and those with the keys and values that the state keeps."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_all: Tensor
    v_all: Tensor
    state: InfiniState
    phase: Tensor  # (B,1), tokens of the segment before
    real: Tensor  # (B,1), the number of real tokens


class Infini(Attention[InfiniState]):
    r"""Softmax attention within a segment, gated per head with linear attention over all earlier segments.

    Segments are counted from the first token, so that the output does not depend on how a sequence is split into calls.
    The memory $S, z$ covers the segments before that of the query. In the first segment it is empty and reads as 0.

    ``segment``: s, the number of tokens per segment. ``delta``: whether a segment adds only the difference between its
    values and what its keys read from the memory. ``eps``: $\epsilon$, added to the denominator.

    The parameter ``gate`` holds one $\beta$ per head. It is initialized to 0, so that both parts have a weight of 1/2.

    The state holds the keys and values of one segment and sums of fixed size. Gradients flow through it;
    ``longspan.states.detach`` stops them.

    Source: Munkhdalai et al. 2024, section 2, eqs 3-6; in the first segment the denominator is eps. Raises ValueError
    for segment < 1 and eps <= 0.
    """

    name, paper, cost = "infini", "2404.07143", "N (s + D) D"
    family = "compressed"
    learned_state = ("sums",)
    equations = (
        r"o_i = \sigma(\beta) \frac{S^\top \phi(q_i)}{z \cdot \phi(q_i) + \epsilon} + "
        r"(1 - \sigma(\beta)) \sum_{j \in P_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"P_i = \lbrace j \le i : \lfloor j / s \rfloor = \lfloor i / s \rfloor \rbrace, \quad "
        r"\phi(x) = \mathrm{elu}(x) + 1",
        r"\text{after each segment:} \quad S \leftarrow S + \sum_j \phi(k_j) v_j^\top, \quad "
        r"z \leftarrow z + \sum_j \phi(k_j)",
        r"\text{delta:} \quad S \leftarrow S + \sum_j \phi(k_j) "
        r"\left(v_j - \frac{S^\top \phi(k_j)}{z \cdot \phi(k_j) + \epsilon}\right)^\top",
    )
    citation = (
        "Munkhdalai, Tsendsuren and Faruqui, Manaal and Gopal, Siddharth",
        "Leave No Context Behind: Efficient Infinite Context Transformers with Infini-attention",
        2024,
    )
    examples = ("infini(segment=5)", "infini(segment=4, delta=True)")
    directions, states = ("causal",), (InfiniState,)

    def __init__(
        self, dim: int, heads: int, *, causal: bool = True, segment: int = 2048, delta: bool = False, eps: float = 1e-6
    ):
        super().__init__(dim, heads, causal=causal)
        if segment < 1:
            raise ValueError(f"segment={segment} must be at least 1: the number of tokens per segment")
        if eps <= 0:
            raise ValueError(f"eps={eps} must be positive: an empty memory is divided by it")
        self.segment, self.delta, self.eps = segment, delta, eps
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.gate = nn.Parameter(torch.zeros(heads))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> InfiniState:
        size = self.dim // self.heads
        sums = upcast_half(self.weight_like.new_zeros(batch, self.heads, size, size + 1))
        keys = self.weight_like.new_zeros(batch, self.heads, self.segment - 1, size)
        position = torch.zeros(batch, dtype=torch.long, device=sums.device)
        return InfiniState(sums, sums.clone(), keys, keys.clone(), position)

    def attend(
        self,
        x: Tensor,
        state: InfiniState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, InfiniState | None]:
        if not x.shape[1]:
            return self.out(x), state
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        if state is not None:
            check_counts("position", state.position)
        if segments is not None:
            o, state = self._packed(q, k, v, state, mask, segments)
        elif state is not None:
            o, state = self._go_on(q, k, v, state, mask)
        else:
            o = rows.scatter_back(mask, self._alone(*rows.gather_valid(mask, q, k, v, axis=2)), axis=2)
        return self.out(merge(o)), state

    def _mix(self, far: Tensor, near: Tensor) -> Tensor:
        """Outputs of the memory and of the segment (B,H,...,E) -> their sum, weighted by the gate."""
        gate = upcast_half(self.gate).sigmoid().view(-1, *(1,) * (near.dim() - 2))
        return (gate * far + (1 - gate) * upcast_half(near)).to(near.dtype)

    def _alone(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Whole sequences of real tokens: (B,H,N,D) -> (B,H,N,D)."""
        n, size = q.shape[2], min(self.segment, q.shape[2])
        q, k, v = (F.pad(t, (0, 0, 0, -n % size)).unflatten(2, (-(-n // size), size)) for t in (q, k, v))
        zeros = upcast_half(q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1] + 1))
        # No query reads the sums of the last segment.
        sums, _ = segmented.memories(k[:, :, :-1], v[:, :, :-1], None, zeros, zeros, delta=self.delta, eps=self.eps)
        return self._mix(segmented.read(q, sums, self.eps), _within(q, k, v)).flatten(2, 3)[:, :, :n]

    def _go_on(
        self, q: Tensor, k: Tensor, v: Tensor, state: InfiniState, mask: Tensor | None
    ) -> tuple[Tensor, InfiniState]:
        """Continue a state: the output of the heads (B,H,N,D), and the next state."""
        (batch, _, n, _), size = q.shape, self.segment
        q, k, v = rows.gather_valid(mask, q, k, v, axis=2)
        count = torch.full_like(state.position, n) if mask is None else mask.sum(1)
        phase = (state.position % size)[:, None]
        k_all, v_all = (torch.cat([old.to(t.dtype), t], 2) for old, t in ((state.keys, k), (state.values, v)))
        form = self._few if n < size else self._many
        o, sums, own = form(_Step(q, k, v, k_all, v_all, state, phase, count[:, None]))
        done = (phase[:, 0] + count) // size
        row = torch.arange(batch, device=done.device)
        slots = done[:, None] * size + torch.arange(size - 1, device=done.device)
        keys, values = (rows.pick(t, _source(slots, phase, t.shape[2] - n, t.shape[2]), 2) for t in (k_all, v_all))
        own = torch.cat([own, torch.zeros_like(own[:, :, :1])], 2)
        after = sums.transpose(1, 2)[row, done], own.transpose(1, 2)[row, done], keys, values, state.position + count
        return rows.scatter_back(mask, o, axis=2), InfiniState._make(
            new.to(old.dtype) for new, old in zip(after, state, strict=True)
        )

    def _few(self, step: _Step) -> tuple[Tensor, Tensor, Tensor]:
        """``_go_on`` for fewer tokens than a segment, of which at most one ends among them."""
        q, k, v, k_all, v_all, state, phase, count = step
        n, old = q.shape[2], k_all.shape[2] - q.shape[2]
        new = torch.arange(n, device=q.device)
        late = phase + new >= self.segment  # (B,N), whether a token is in the second of two segments
        real = torch.stack([~late, late], 1) & (new < count)[:, None]
        keys, values = (t[:, :, None].expand(-1, -1, 2, -1, -1) for t in (k, v))
        kept = real[:, None, ..., None]
        sums, own = segmented.memories(keys, values, kept, state.sums, state.recent, delta=self.delta, eps=self.eps)
        first, second = segmented.read(q[:, :, None], sums[:, :, :2], self.eps).unbind(2)
        before = (torch.arange(old, device=q.device) < phase)[:, None] & ~late[:, :, None]
        within = (late[:, :, None] == late[:, None]) & (new <= new[:, None])
        near = dense.attend(q, k_all, v_all, mask=torch.cat([before, within], 2)[:, None])
        return self._mix(torch.where(late[:, None, :, None], second, first), near), sums, own

    def _many(self, step: _Step) -> tuple[Tensor, Tensor, Tensor]:
        """``_go_on`` for at least one segment of tokens: rows are shifted such that their segments line up."""
        q, k, v, k_all, v_all, state, phase, count = step
        n, total = q.shape[2], k_all.shape[2]
        groups = -(-total // self.segment), self.segment
        slots = torch.arange(groups[0] * groups[1], device=q.device)[None]
        k, v = (rows.pick(t, _source(slots, phase, total - n, total), 2).unflatten(2, groups) for t in (k_all, v_all))
        q = rows.pick(q, (slots - phase).clamp(0, n - 1), 2).unflatten(2, groups)
        # ``state.recent`` already contains the tokens of earlier calls.
        real = ((slots >= phase) & (slots < phase + count)).unflatten(1, groups)[:, None, ..., None]
        sums, own = segmented.memories(k, v, real, state.sums, state.recent, delta=self.delta, eps=self.eps)
        o = self._mix(segmented.read(q, sums[:, :, :-1], self.eps), _within(q, k, v)).flatten(2, 3)
        return rows.pick(o, phase + torch.arange(n, device=q.device), 2), sums, own

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: InfiniState | None, mask: Tensor | None, segments: Tensor
    ) -> tuple[Tensor, InfiniState | None]:
        """Packed sequences: the first continues the state, the last one produces the next state."""
        if state is None:
            return rows.ragged(q, k, v, self._alone, mask, segments, exact=False), None
        real = torch.ones_like(segments, dtype=torch.bool) if mask is None else mask
        first, last = segments == segments[:, :1], segments == segments[:, -1:]
        o, on = self._go_on(q, k, v, state, real & first)
        others = rows.ragged(q, k, v, self._alone, real & ~first, segments, exact=False)
        _, anew = self._go_on(q, k, v, self.start(len(q), 0), real & last)
        whole = first[:, -1]
        kept = [torch.where(whole.view(-1, *(1,) * (a.dim() - 1)), a, b) for a, b in zip(on, anew, strict=True)]
        return torch.where(first[:, None, :, None], o, others), InfiniState._make(kept)


def _within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention in each segment, (B,H,G,s,D)."""
    rows_ = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    return dense.attend(*rows_, causal=True).unflatten(0, (len(q), q.shape[2])).transpose(1, 2)


def _source(slots: Tensor, phase: Tensor, old: int, total: int) -> Tensor:
    """Indices of the tokens of the current and the next segments, after ``old`` slots of which ``phase`` are in use."""
    return torch.where(slots < phase, slots, old + slots - phase).clamp(max=total - 1)
