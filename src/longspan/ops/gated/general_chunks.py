"""The general delta rule in chunks: matrix products inside a chunk, the state from chunk to chunk.

With G_i the sum of the log decays of a chunk up to token i, S the state before the chunk, and for rows a and b

    [a b]_ij = sum_d a_id b_jd e^(G_id - G_jd),

    U = (I + [r e])^-1 ([r k] V + (e^G R) S), with [r .] for j < i
    O = (e^G Q) S + [q k] V - [q e] U, with [q .] for j <= i
    S' = e^(G_C) S + (e^(G_C - G) K)^T V - (e^(G_C - G) E)^T U

which is the WY form of a product of matrices Diag(e^g) - e r^T (Yang et al. 2024, 2406.06484, section 3; Peng et al.
2025, 2503.14456). If tokens read before the decay, row i of [r .] and of e^G R has G_(i-1) in place of G_i.
Then row i equals row i - 1 of the products of rows that are moved up by one, so no decay is divided out.

Axes and shapes as in ``chunks``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_ops import kernel
from ..operands import transformed, zero_masked
from ..packed import by_sequence
from . import chunks, spans
from .chunks import CHUNK, Span, times
from .decay_per_channel import before_here, from_here_on
from .decays import LOWEST
from .operands import GeneralRecurrence
from .spans import Place


class Chunked(NamedTuple):
    """Operands as in ``GeneralRecurrence``, of one sequence per row, and the tokens of a chunk."""

    q: Tensor
    k: Tensor
    v: Tensor
    read: Tensor
    erase: Tensor
    log_decay: Tensor | None
    state: Tensor
    mask: Tensor | None
    segments: Tensor | None
    scale: float
    early: bool
    chunk: int = CHUNK  # a power of two

    def gated(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> chunks.Chunked:
        """Return operands of the recurrence without the delta rule, on the same tokens."""
        rest = self.state, self.mask, self.segments, self.scale, self.chunk
        return chunks.Chunked(q, k, v, log_decay, None, *rest)

    @property
    def places(self) -> list[Place]:
        """The spans of the sequence, as for the delta rule."""
        return self.gated(self.q, self.k, self.v)._replace(beta=self.v).places


def attend(r: GeneralRecurrence) -> tuple[Tensor, Tensor]:
    """``general.serve`` in chunks, in operations of torch.

    Time and memory as in ``chunks.attend``, with about twice the products.
    """
    if not r.v.numel() or not r.q.shape[2]:
        return torch.zeros_like(r.v), r.state.clone()
    return by_sequence(composed if transformed() else chunked, r)


def chunked(r: GeneralRecurrence, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """``attend`` without ``cu_seqlens``."""
    return _attend(Chunked(*r[:9], r.scale, r.early, chunk))


def composed(r: GeneralRecurrence, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """``chunked`` from operations with derivatives of any order."""
    return _composed(Chunked(*r[:9], r.scale, r.early, chunk))


def step(r: GeneralRecurrence, donate: bool) -> tuple[Tensor, Tensor]:
    """``general.serve`` for N = 1, in few passes over the state, which ``donate`` overwrites."""
    q, k, v, read, erase, log_decay, state, mask, _, _, scale, early = r
    wide, groups = state.dtype, v.shape[1] // k.shape[1]
    # A masked token neither decays nor writes, and reads 0.
    q, k, v, read, erase, log_decay = zero_masked(mask, q, k, v, read, erase, log_decay)
    queries, keys, reads, erasures = (t.to(wide).repeat_interleave(groups, 1) for t in (q, k, read, erase))
    early = early and log_decay is not None
    seen = reads @ state if early else None
    if log_decay is not None:
        alpha = log_decay.to(wide).clamp(min=LOWEST).exp()
        alpha = alpha.mT if log_decay.dim() == 4 else alpha[..., None]
        state = state.mul_(alpha) if donate else state * alpha
        donate = donate or not (torch.is_grad_enabled() or transformed())
    seen = reads @ state if seen is None else seen
    left, right = torch.cat([keys, -erasures], 2).mT, torch.cat([v.to(wide), seen], 2)  # (B,H,D,2), (B,H,2,E)
    state = state.add_(left @ right) if donate else state + left @ right
    return (queries * scale @ state).to(v.dtype), state


@dataclass
class Reads:
    """What the tokens of a span read from the state before they write, and erase from it."""

    read: Tensor  # (B,G,1,L,C,D)
    erase: Tensor  # (B,G,1,L,C,D)
    entering: Tensor | None  # (...,C,1|D) the share of the state before the chunk that a token reads; None for 1
    same: Tensor | None  # (B,1,1,L,C,C) two tokens lie in one segment
    early: bool

    def products(self, span: Span, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return [r b] for j < i, else 0: (...,C,D) -> (...,C,C); and the products from which it was taken."""
        if not self.early:
            found = span.products(self.read, b)
            return found.tril(-1), found
        found = span.products(_up(self.read), b)
        return times(_down(found), self.same), found

    def products_backward(self, span: Span, grad: Tensor, b: Tensor, found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``read``, b and the log decays, given that of [r b]."""
        if not self.early:
            return span.products_backward(grad.tril(-1), self.read, b, found)
        above = _up(times(grad.tril(-1), self.same))
        dread, db, decay = span.products_backward(above, _up(self.read), b, found)
        return _down(dread), db, decay


def _up(x: Tensor) -> Tensor:
    """Move rows up by one: (...,C,D) -> (...,C,D), zeros last."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1))


def _down(x: Tensor, first: float = 0.0) -> Tensor:
    """Move rows down by one: (...,C,D) -> (...,C,D), ``first`` in the first row."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0), value=first)


def _spans_of(r: Chunked, place: Place) -> tuple[Span, Reads]:
    """Return the span at ``place`` of q, k, v, read, erase and log_decay."""
    span = chunks._span(r.gated(r.q, r.k, r.v, r.log_decay), place)
    pair = chunks._span(r.gated(r.read, r.erase, r.v[..., :0]), place)
    early = r.early and r.log_decay is not None
    entering = span.entering
    if early and entering is not None:
        entering = times(_down(entering, 1.0), pair.entering)
    return span, Reads(pair.q, pair.k, entering, pair.same, early)


@dataclass
class Solved:
    """The products of a span, and its solved system."""

    rk: Tensor  # [r k] (...,C,C), and those from which it was taken
    rk_found: Tensor
    re: Tensor
    re_found: Tensor
    u: Tensor  # (B,G,R,L,C,E) U for a state of zeros
    w: Tensor  # (B,G,R,L,C,D) U is u + w S


def _solved(span: Span, reads: Reads) -> Solved:
    rk, rk_found = reads.products(span, span.k)
    re, re_found = reads.products(span, reads.erase)
    rows = span.v.shape[:-1]
    right = torch.cat([rk @ span.v, times(reads.read, reads.entering).expand(*rows, -1)], -1)
    solved = torch.linalg.solve_triangular(re.expand(*rows, -1), right, upper=False, unitriangular=True)
    u, w = solved.split([span.v.shape[-1], span.k.shape[-1]], -1)
    return Solved(rk, rk_found, re, re_found, u, w)


def _states(span: Span, reads: Reads, solved: Solved, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before the chunks (B,G,R,L,D,E), the state after the last chunk, and U (B,G,R,L,C,E)."""
    written = times(span.k, span.leaving).mT @ span.v
    erase = times(reads.erase, span.leaving).mT
    states, found = [], []
    for i in range(span.v.shape[3]):
        states.append(state)
        found.append(solved.u[:, :, :, i] + solved.w[:, :, :, i] @ state)
        kept = state if span.whole is None else state * span.whole[:, :, :, i]
        state = kept + written[:, :, :, i] - erase[:, :, :, i] @ found[-1]
    return torch.stack(states, 3), state, torch.stack(found, 3)


def _advance(span: Span, reads: Reads, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Process one span: -> the outputs (B,G,R,L,C,E), scaled, and the state after it."""
    states, state, u = _states(span, reads, _solved(span, reads), state)
    out = times(span.q, span.entering) @ states
    out = out + span.products(span.q, span.k) @ span.v - span.products(span.q, reads.erase) @ u
    return out * scale, state


def _retreat(
    span: Span, reads: Reads, start: Tensor, grad: Tensor, after: Tensor, *, decays: bool
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradients of one span: of q, k, v, read, erase, log decays (...,C,1|D); of the state before it.

    start (B,G,R,D,E) is the state before the span. grad (B,G,R,L,C,E) and ``after`` (B,G,R,D,E) are the gradients of
    the outputs, times their scale, and of the state after the span.
    """
    q, k, v, erase = span.q, span.k, span.v, reads.erase
    solved = _solved(span, reads)
    states, _, u = _states(span, reads, solved, start)
    queries, keys, erased = times(q, span.entering), times(k, span.leaving), times(erase, span.leaving)
    qk, qe = span.products(q, k), span.products(q, erase)

    # The states, from the last chunk to the first; ``ahead`` is the gradient of the state after each.
    from_u, from_read = qe.mT @ grad, queries.mT @ grad
    ahead, found = [], []
    for i in reversed(range(grad.shape[3])):
        ahead.append(after)
        found.append(-from_u[:, :, :, i] - erased[:, :, :, i] @ after)
        kept = after if span.whole is None else after * span.whole[:, :, :, i]
        after = kept + from_read[:, :, :, i] + solved.w[:, :, :, i].mT @ found[-1]
    ahead, du = torch.stack(ahead[::-1], 3), torch.stack(found[::-1], 3)

    # The right side of the system, and its matrix.
    system = solved.re.expand(*v.shape[:-1], -1)
    right = torch.linalg.solve_triangular(system.mT, du, upper=True, unitriangular=True)
    dv = qk.mT @ grad + keys @ ahead + solved.rk.mT @ right
    parts = (
        span.products_backward(grad @ v.mT, q, k, qk),
        span.products_backward(-grad @ u.mT, q, erase, qe),
        reads.products_backward(span, right @ v.mT, k, solved.rk_found),
        reads.products_backward(span, -right @ u.mT, erase, solved.re_found),
    )
    asked, seen = times(grad @ states.mT, span.entering), times(right @ states.mT, reads.entering)
    put, taken = times(v @ ahead.mT, span.leaving), times(-u @ ahead.mT, span.leaving)
    dq, dread = parts[0][0] + parts[1][0] + asked, parts[2][0] + parts[3][0] + seen
    dk, derase = parts[0][1] + parts[2][1] + put, parts[1][1] + parts[3][1] + taken
    dq, dk, dread, derase = (t.sum(2, keepdim=True) for t in (dq, dk, dread, derase))
    if not decays:
        return [dq, dk, dv, dread, derase, None], after
    assert span.whole is not None
    # The decay of token t scales three parts: reads of the state before the chunk by t and later tokens, writes of
    # earlier tokens to the state after it, and the share of the first state in the second.
    early = reads.read * seen
    asks, writes = q * asked + (_up(early) if reads.early else early), k * put + erase * taken
    kept = (states * ahead).mul(span.whole).sum(-1, keepdim=True).mT
    if span.log_decays is None:
        asks, writes, kept = (t.sum(-1, keepdim=True) for t in (asks, writes, kept))
    between = parts[0][2] + parts[1][2] + parts[2][2] + parts[3][2]
    ddecay = between + from_here_on(asks) + before_here(writes) + kept
    return [dq, dk, dv, dread, derase, ddecay], after


def _forward(r: Chunked, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E), the state before each span but the first."""
    with torch.autocast(r.q.device.type, enabled=False):
        o, end, starts = spans.forward(partial(_advanced, r), r)
    spans.clear_masked(r.mask, o)
    return o, end, starts


def _advanced(r: Chunked, place: Place, before: Tensor) -> tuple[Tensor, Tensor]:
    return _advance(*_spans_of(r, place), before, r.scale)


def _backward(
    r: Chunked, above: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    (grad, grad_end), (starts,) = above, kept
    upstream = r.gated(r.q, r.k, grad)._replace(segments=None)

    def retreat(place: Place, start: Tensor, after: Tensor) -> tuple[list[Tensor | None], Tensor]:
        scaled = chunks._span(upstream, place).v * r.scale
        return _retreat(*_spans_of(r, place), start, scaled, after, decays=r.log_decay is not None)

    return spans.backward(retreat, r, r[:6], starts, grad_end)


def _composed(r: Chunked) -> tuple[Tensor, Tensor]:
    return spans.composed(partial(_advanced, r), r)


_attend = kernel(
    "general_chunks",
    Chunked,
    _forward,
    _backward,
    shapes=spans.shapes,
    again=_composed,
    inputs=7,
    kept=1,
)
