"""The forward pass of ``chunks`` for a decay per head on a CPU, without the delta rule, on buffers that spans share.

Letters and axes as in ``chunks``. The states before the chunks of a span form one product. Everything that does not
depend on the span is computed once, views included: dispatching an operation takes a few microseconds, and a span has
about thirty.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..buffers import Buffers
from ..segments import borders_of
from .decays import FAINT, LOWEST, faded


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    places: list[tuple[int, int, int]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o (B,H,N,E) in v's dtype, not masked, the last state, and the state before each span but the first.

    q, k (B,G,N,D), v (B,H,N,E), log decays (B,H,N), state (B,H,D,E), places (start, chunks, tokens per chunk). Besides
    one span, memory holds about ten numbers per token and head.
    """
    o, starts = torch.empty_like(v), state.new_empty(len(places) - 1, *state.shape)
    end, buffers, part = state.unflatten(1, (k.shape[1], -1)), Buffers(state), None
    for i, (start, count, width) in enumerate(places):
        if i > 0:
            starts[i - 1] = end.flatten(1, 2)
        # The chunks of the last span may have a different width.
        if part is None or part.width != width:
            part = Part((start, count, width), (q, k, v, log_decay[..., None], o), mask, segments, scale, state.dtype)
        end = part.span((start - part.start) // (part.most * width), end, buffers)
    return o, end.flatten(1, 2).contiguous(), starts


class Room:
    """The tensors that spans of one size share, and their views for matrix products."""

    def __init__(self, q: Tensor, v: Tensor, buffers: Buffers):
        """q (B,G,1,L,C,D) and v (B,G,R,L,C,E) of a span."""
        pairs, rows, (width, d), e = q.shape[:4], v.shape[:4], q.shape[4:], v.shape[-1]
        self.q, self.k, self.v = buffers("q", *q.shape), buffers("k", *q.shape), buffers("v", *v.shape)
        self.weights, self.states = buffers("weights", *rows, width, width), buffers("states", *rows, d, e)
        # Tensors that are no longer needed share their memory: one name is one buffer, large enough for both uses.
        buffers("read", math.prod(rows) * width * max(width, e))
        self.products, self.read = buffers("read", *pairs, width, width), buffers("read", *v.shape)
        buffers("written", math.prod(rows) * max(width, d) * e)
        self.written, self.out = buffers("written", *rows, d, e), buffers("written", *v.shape)
        self.alone = pairs == rows  # one value head for each key head
        self.kept = self.k if self.alone else buffers("kept", *rows, width, d)
        self.first, self.last = ([t.select(3, at) for t in (self.written, self.states)] for at in (0, -1))
        self.written_rows, self.states_rows = (t.view(-1, rows[3], d * e) for t in (self.written, self.states))
        self.keys, self.kept_keys = _flat(self.k).mT, _flat(self.kept).mT
        self.flat_q, self.flat_v, self.flat_read, self.flat_out = map(_flat, (self.q, self.v, self.read, self.out))
        self.flat_products, self.flat_weights = _flat(self.products), _flat(self.weights)
        self.flat_written, self.flat_states = _flat(self.written), _flat(self.states)


class Part:
    """All chunks of one width, and the few numbers per token that decay and borders contribute."""

    def __init__(
        self,
        place: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        mask: Tensor | None,
        segments: Tensor | None,
        scale: float,
        wide: torch.dtype,
    ):
        """``place`` is the first span, which has the most chunks; ``tensors`` are q, k, v, log decays and o."""
        self.start, self.most, self.width = place
        groups, chunks = tensors[0].shape[1], (tensors[0].shape[2] - self.start) // self.width
        stop = self.start + chunks * self.width

        def cut(x: Tensor, groups: int) -> Tensor:
            return x[:, :, self.start : stop].view(x.shape[0], groups, -1, chunks, self.width, x.shape[-1])

        q, k, v, log_decay, o = (cut(t, groups) for t in tensors)
        hidden = None if mask is None else cut(~mask[:, None, :, None], 1)
        log_decays = log_decay.to(wide).clamp(min=LOWEST)
        total = (log_decays if hidden is None else log_decays.masked_fill(hidden, 0.0)).cumsum(-2, dtype=torch.float64)
        self.strong = bool(total.min() < FAINT[wide])
        leaving = faded((total[..., -1:, :] - total).to(wide))
        entering, same = faded(total.clone(), wide).to(wide), None
        whole = entering[..., -1:, :]
        if segments is not None:
            borders = borders_of(segments, self.start, chunks, self.width, leaving)
            same, first, last, more = (b[:, :, None] for b in borders)
            entering, leaving, whole = entering * first, leaving * last, whole * more
        self.scale, left, nothing = scale, self._left(whole), [None] * -(-chunks // self.most)
        along = (q, k, v, o, leaving, entering * scale, whole, *split(total, wide), hidden, same)
        spans = (nothing if t is None else t.split(self.most, 3) for t in along)
        self.spans, self.rooms = list(zip(*spans, left, strict=True)), dict[int, Room]()

    def _left(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Return the remaining share of each chunk's writes before each later chunk, for every span: (B G R,L,L).

        ``whole`` (B,G,R,chunks,1,1) is the share of the state that remains after each chunk. The result is 0 on and
        above the diagonal. Denormal numbers are set to 0, since a CPU is slow on them.
        """
        chunks, most = whole.shape[3], self.most
        whole = F.pad(whole.flatten(0, 2)[..., 0, 0], (0, -chunks % most)).unflatten(-1, (-1, most))
        later = whole.new_ones(most, most).tril(-1) > 0
        between = torch.where(later, whole[..., None], 1.0).cumprod(-2).tril()
        between = between.masked_fill(between < torch.finfo(between.dtype).tiny, 0.0)
        *full, last = F.pad(between[..., :-1, :], (0, 0, 1, 0)).unbind(1)
        over = chunks - len(full) * most
        return *full, last[:, :over, :over]

    def span(self, index: int, state: Tensor, buffers: Buffers) -> Tensor:
        """Write the outputs of a span, given the state (B,G,R,D,E) before it; return the state after it."""
        q, k, v, o, leaving, reading, whole, rounded, rest, hidden, same, left = self.spans[index]
        count = q.shape[3]
        if count not in self.rooms:
            self.rooms[count] = Room(q, v, buffers)
        room = self.rooms[count]
        room.q.copy_(q)
        room.k.copy_(k)
        room.v.copy_(v)
        if hidden is not None:
            room.k.masked_fill_(hidden, 0.0)
            room.v.masked_fill_(hidden, 0.0)
        torch.bmm(room.flat_q, room.keys, out=room.flat_products)
        # e^(G_i - G_j), used for j <= i only. Above the diagonal the exponents of strong decays are large.
        weights = differences(rounded, rest, room.weights)
        weights = faded(weights.tril_()) if self.strong else weights.exp_()
        weights.mul_(room.products).tril_()
        if same is not None:
            weights.mul_(same)

        torch.mul(room.k, leaving, out=room.kept)
        torch.bmm(room.kept_keys, room.flat_v, out=room.flat_written)
        (first_written, first_state), (last_written, last_state) = room.first, room.last
        if count > 1:
            first_written.addcmul_(whole.select(3, 0), state)
            torch.bmm(left, room.written_rows, out=room.states_rows)
        first_state.copy_(state)
        state = torch.addcmul(last_written, whole.select(3, -1), last_state)

        queries = room.flat_q if room.alone else _flat(room.q.expand(*v.shape[:4], *q.shape[4:]))
        torch.bmm(queries, room.flat_states, out=room.flat_read)
        torch.baddbmm(room.flat_out, room.flat_weights, room.flat_v, beta=0, alpha=self.scale, out=room.flat_out)
        torch.addcmul(room.out, reading, room.read, out=o)
        return state


def split(total: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Split sums in float64 into a part in ``wide`` and its rounding error; None if there is none."""
    rounded = total.to(wide)
    return rounded, None if wide == total.dtype else (total - rounded).to(wide)


def differences(rounded: Tensor, rest: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return all G_i - G_j, (...,C,C), from the two parts of ``split`` of G (...,C,1).

    Differences of large sums in float32 would lose all digits, and float64 is slow. The difference of rounded sums has
    the full precision of its size; the rounding errors of the two sums are then added to it.
    """
    out = torch.sub(rounded, rounded.mT, out=out)
    return out if rest is None else out.add_(rest).sub_(rest.mT)


def _flat(x: Tensor) -> Tensor:
    """Flatten the leading axes: (...,C,D) -> (.,C,D)."""
    return x.flatten(0, -3)
