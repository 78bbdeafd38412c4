"""The forward pass of ``chunks`` for a decay per head on a CPU: no delta rule, and no tensor that is not used again.

Letters and axes as there. Keys are turned, (D,C), once, since a product with a transposed matrix takes about twice as
long as one without; the states before the chunks of a span are one product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .buffers import Buffers
from .recurrence import FAINT, LOWEST, borders_of, faded


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
    """q, k (B,G,N,D), v (B,H,N,E), log decays (B,H,N), state (B,H,D,E), spans (start, chunks, tokens per chunk).

    -> o (B,H,N,E) in v's dtype, not masked; the last state; the state before each span but the first. Beside a span
    there are some ten numbers per token and head in memory.
    """
    o, starts = torch.empty_like(v), state.new_empty(len(places) - 1, *state.shape)
    end, buffers, part = state.unflatten(1, (k.shape[1], -1)), Buffers(state), None
    for i, (start, count, width) in enumerate(places):
        if i > 0:
            starts[i - 1] = end.flatten(1, 2)
        # The last span may have chunks of another width.
        if part is None or part.width != width:
            part = Part((start, count, width), (q, k, v, log_decay[..., None], o), mask, segments, scale, state.dtype)
        end = part.span((start - part.start) // width, count, end, buffers)
    return o, end.flatten(1, 2).contiguous(), starts


class Part:
    """All chunks of one width, and the few numbers per token that decay and borders are to them."""

    def __init__(
        self,
        place: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        mask: Tensor | None,
        segments: Tensor | None,
        scale: float,
        wide: torch.dtype,
    ):
        """``place``: the first span, and none has more chunks; ``tensors``: q, k, v, log decays and o."""
        self.start, self.most, self.width = place
        groups, chunks = tensors[0].shape[1], (tensors[0].shape[2] - self.start) // self.width
        stop = self.start + chunks * self.width

        def cut(x: Tensor, groups: int) -> Tensor:
            return x[:, :, self.start : stop].view(x.shape[0], groups, -1, chunks, self.width, x.shape[-1])

        self.q, self.k, self.v, log_decay, self.o = (cut(t, groups) for t in tensors)
        self.hidden = None if mask is None else cut(~mask[:, None, :, None], 1)
        steps = log_decay.to(wide).clamp(min=LOWEST)
        total = (steps if self.hidden is None else steps.masked_fill(self.hidden, 0.0)).double().cumsum(-2)
        self.total, self.rest = split(total, wide)
        self.strong = bool(total.min() < FAINT[wide])
        self.leaving = faded((total[..., -1:, :] - total).to(wide)).mT
        entering = faded(total.clone(), wide).to(wide)
        self.whole, self.same = entering[..., -1:, :], None
        if segments is not None:
            borders = borders_of(segments, self.start, chunks, self.width, self.total)
            self.same, first, last, whole = (b[:, :, None] for b in borders)
            entering, self.leaving, self.whole = entering * first, self.leaving * last.mT, self.whole * whole
        self.scale, self.reading, self.left = scale, entering * scale, self._left()

    def _left(self) -> Tensor:
        """What is left, before each chunk of a span, of what each was left with: (B,G,R,spans,L,L), L the most chunks.

        Zero on and above the diagonal. The smallest numbers are zero too: a CPU takes long over those below them.
        """
        whole = self.whole[..., 0, 0]
        whole = F.pad(whole, (0, -whole.shape[-1] % self.most)).unflatten(-1, (-1, self.most))
        later = whole.new_ones(self.most, self.most).tril(-1) > 0
        between = torch.where(later, whole[..., None], 1.0).cumprod(-2).tril()
        between = between.masked_fill(between < torch.finfo(between.dtype).tiny, 0.0)
        return F.pad(between[..., :-1, :], (0, 0, 1, 0))

    def span(self, first: int, count: int, state: Tensor, buffers: Buffers) -> Tensor:
        """Write the outputs of some chunks, from the state (B,G,R,D,E) before them -> the state after them."""
        at = slice(first, first + count)
        q, k, v, o = (t[:, :, :, at] for t in (self.q, self.k, self.v, self.o))
        leaving, whole, pairs, rows = self.leaving[:, :, :, at], self.whole[:, :, :, at], q.shape[:4], v.shape[:4]
        (width, e), d = v.shape[4:], q.shape[-1]
        queries, keys = buffers("q", *q.shape).copy_(q), buffers("k", *pairs, d, width).copy_(k.mT)
        values = buffers("v", *v.shape).copy_(v)
        if self.hidden is not None:
            hidden = self.hidden[:, :, :, at]
            keys.masked_fill_(hidden.mT, 0.0)
            values.masked_fill_(hidden, 0.0)
        products = buffers("products", *pairs, width, width)
        torch.bmm(_flat(queries), _flat(keys), out=_flat(products))
        inside = self._weights(at, buffers("weights", *rows, width, width)).mul_(products).tril_()
        if self.same is not None:
            inside.mul_(self.same[:, :, :, at])

        # With one value head for each key head this overwrites the keys, which nobody reads any more.
        kept = keys if pairs == rows else buffers("kept", *rows, d, width)
        written, states = buffers("written", *rows, d, e), buffers("states", *rows, d, e)
        torch.bmm(_flat(torch.mul(keys, leaving, out=kept)), _flat(values), out=_flat(written))
        if count > 1:
            written[:, :, :, 0].addcmul_(whole[:, :, :, 0], state)
            left = self.left[:, :, :, first // self.most, :count, :count].flatten(0, 2)
            torch.bmm(left, written.view(-1, count, d * e), out=states.view(-1, count, d * e))
        states[:, :, :, 0] = state
        state = torch.addcmul(written[:, :, :, -1], whole[:, :, :, -1], states[:, :, :, -1])

        # What nobody reads any more is overwritten.
        read, out = buffers("products", *v.shape), buffers("written", *v.shape)
        torch.bmm(_flat(queries.expand(*rows, width, d)), _flat(states), out=_flat(read))
        torch.baddbmm(_flat(out), _flat(inside), _flat(values), beta=0, alpha=self.scale, out=_flat(out))
        torch.addcmul(out, self.reading[:, :, :, at], read, out=o)
        return state

    def _weights(self, at: slice, out: Tensor) -> Tensor:
        """e^(G_i - G_j), which counts for j <= i only."""
        differences(self.total[:, :, :, at], None if self.rest is None else self.rest[:, :, :, at], out)
        # Above the diagonal exponents are large where decays are strong.
        return faded(out.tril_()) if self.strong else out.exp_()


def split(total: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Sums in float64 -> the same rounded to ``wide``, and what rounding took; None where it takes nothing."""
    rounded = total.to(wide)
    return rounded, None if wide == total.dtype else (total - rounded).to(wide)


def differences(rounded: Tensor, rest: Tensor | None, out: Tensor | None = None) -> Tensor:
    """All G_i - G_j, (...,C,C), from what ``split`` makes of G (...,C,1).

    Differences of large sums in float32 would have no digits left, and float64 takes long. The difference of rounded
    sums is as exact as its own size allows; what rounding took from each sum is added to it.
    """
    out = torch.sub(rounded, rounded.mT, out=out)
    return out if rest is None else out.add_(rest).sub_(rest.mT)


def _flat(x: Tensor) -> Tensor:
    """(...,C,D) -> (.,C,D)."""
    return x.flatten(0, -3)
