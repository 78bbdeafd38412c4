"""Softmax attention within segments, mixed with what a linear-attention memory holds of all segments before."""

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
    """Sums are float32 at least; their last column is the normalizer."""

    sums: Tensor  # (B,H,D,D+1) of the segments that are complete
    recent: Tensor  # (B,H,D,D+1) what the one that is not will add to them
    keys: Tensor  # (B,H,s-1,D) its keys, the first in the first slot
    values: Tensor  # (B,H,s-1,D)
    position: Tensor  # (B,) int64, real tokens so far


class Infini(Attention):
    r"""Softmax attention within a segment, and a gate per head to linear attention over all segments before it.

    Segments of ``segment`` tokens are counted from the first token, so that any cut of a sequence into calls gives one
    answer. The memory $S, z$ is that of the segments before the query's; in the first it is empty, and reads as 0.

    ``delta``: a segment adds only what its values differ by from those that its keys read in the memory already.
    ``eps``: $\epsilon$, added to the denominator. ``gate`` holds one $\beta$ per head, 0 at first: both count half.

    The state has keys and values of one segment, and sums of one size. Gradients go through it;
    ``longspan.states.detach`` ends them.

    Source: Munkhdalai et al. 2024, section 2, eqs 3-6; the first segment's empty memory is divided by eps alone. Raises
    ValueError for segment < 1 and eps <= 0.
    """

    name, paper, cost = "infini", "2404.07143", "N (s + D) D"
    family = "compressed"
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
            raise ValueError(f"segment={segment} is a number of tokens; it must be at least 1")
        if eps <= 0:
            raise ValueError(f"eps={eps} is what an empty memory is divided by; it must be positive")
        self.segment, self.delta, self.eps = segment, delta, eps
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.gate = nn.Parameter(torch.zeros(heads))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch, capacity):
        size = self.dim // self.heads
        sums = upcast_half(self.weight_like.new_zeros(batch, self.heads, size, size + 1))
        keys = self.weight_like.new_zeros(batch, self.heads, self.segment - 1, size)
        position = torch.zeros(batch, dtype=torch.long, device=sums.device)
        return InfiniState(sums, sums.clone(), keys, keys.clone(), position)

    def attend(self, x, state, *, mask=None, segments=None, donate=False):
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

    def _mix(self, far, near):
        """What is read of the memory and in the segment (B,H,...,E) -> both, weighed by the gate."""
        gate = upcast_half(self.gate).sigmoid().view(-1, *(1,) * (near.dim() - 2))
        return (gate * far + (1 - gate) * upcast_half(near)).to(near.dtype)

    def _alone(self, q, k, v):
        """Whole sequences of real tokens: (B,H,N,D) -> (B,H,N,D)."""
        n, size = q.shape[2], min(self.segment, q.shape[2])
        q, k, v = (F.pad(t, (0, 0, 0, -n % size)).unflatten(2, (-(-n // size), size)) for t in (q, k, v))
        zeros = upcast_half(q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1] + 1))
        # The last segment's own sums are nobody's to read.
        sums, _ = segmented.memories(k[:, :, :-1], v[:, :, :-1], None, zeros, zeros, delta=self.delta, eps=self.eps)
        return self._mix(segmented.read(q, sums, self.eps), _within(q, k, v)).flatten(2, 3)[:, :, :n]

    def _go_on(self, q, k, v, state, mask):
        """New tokens after those of a state: what the heads read (B,H,N,D), and the state with them."""
        (batch, _, n, _), size = q.shape, self.segment
        q, k, v = rows.gather_valid(mask, q, k, v, axis=2)
        count = torch.full_like(state.position, n) if mask is None else mask.sum(1)
        phase = (state.position % size)[:, None]
        k_all, v_all = (torch.cat([old.to(t.dtype), t], 2) for old, t in ((state.keys, k), (state.values, v)))
        form = self._few if n < size else self._many
        o, sums, own = form(q, k, v, k_all, v_all, state, phase, count[:, None])
        done = (phase[:, 0] + count) // size
        row = torch.arange(batch, device=done.device)
        slots = done[:, None] * size + torch.arange(size - 1, device=done.device)
        keys, values = (rows.pick(t, _source(slots, phase, t.shape[2] - n, t.shape[2]), 2) for t in (k_all, v_all))
        own = torch.cat([own, torch.zeros_like(own[:, :, :1])], 2)
        after = sums.transpose(1, 2)[row, done], own.transpose(1, 2)[row, done], keys, values, state.position + count
        return rows.scatter_back(mask, o, axis=2), InfiniState._make(
            new.to(old.dtype) for new, old in zip(after, state, strict=True)
        )

    def _few(self, q, k, v, k_all, v_all, state, phase, count):
        """Fewer tokens than a segment has, so that one may end among them: each query meets what is there."""
        n, old = q.shape[2], k_all.shape[2] - q.shape[2]
        new = torch.arange(n, device=q.device)
        late = phase + new >= self.segment  # (B,N) in the second of two segments
        real = torch.stack([~late, late], 1) & (new < count)[:, None]
        keys, values = (t[:, :, None].expand(-1, -1, 2, -1, -1) for t in (k, v))
        options = {"delta": self.delta, "eps": self.eps}
        sums, own = segmented.memories(keys, values, real[:, None, ..., None], state.sums, state.recent, **options)
        first, second = segmented.read(q[:, :, None], sums[:, :, :2], self.eps).unbind(2)
        before = (torch.arange(old, device=q.device) < phase)[:, None] & ~late[:, :, None]
        beside = (late[:, :, None] == late[:, None]) & (new <= new[:, None])
        near = dense.attend(q, k_all, v_all, mask=torch.cat([before, beside], 2)[:, None])
        return self._mix(torch.where(late[:, None, :, None], second, first), near), sums, own

    def _many(self, q, k, v, k_all, v_all, state, phase, count):
        """At least as many tokens as a segment has: rows are moved so that their segments begin at the same places."""
        n, total = q.shape[2], k_all.shape[2]
        groups = -(-total // self.segment), self.segment
        slots = torch.arange(groups[0] * groups[1], device=q.device)[None]
        k, v = (rows.pick(t, _source(slots, phase, total - n, total), 2).unflatten(2, groups) for t in (k_all, v_all))
        q = rows.pick(q, (slots - phase).clamp(0, n - 1), 2).unflatten(2, groups)
        # Those of earlier calls have been added to what the state keeps.
        real = ((slots >= phase) & (slots < phase + count)).unflatten(1, groups)[:, None, ..., None]
        options = {"delta": self.delta, "eps": self.eps}
        sums, own = segmented.memories(k, v, real, state.sums, state.recent, **options)
        o = self._mix(segmented.read(q, sums[:, :, :-1], self.eps), _within(q, k, v)).flatten(2, 3)
        return rows.pick(o, phase + torch.arange(n, device=q.device), 2), sums, own

    def _packed(self, q, k, v, state, mask, segments):
        """The first sequence goes on with the state, others stand alone, the last one leaves the state."""
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
    """Where the tokens of a segment and of the next ones stand, after ``old`` places of which ``phase`` are in use."""
    return torch.where(slots < phase, slots, old + slots - phase).clamp(max=total - 1)
