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

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import double_backward
from . import chunks, spans
from .chunks import CHUNK, Span, times
from .decay_per_channel import before_here, from_here_on
from .spans import Place


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    early: bool,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """``general.recur`` in chunks; ``chunk`` is a power of two, ``early`` is ``read_before_decay``.

    Time and memory as in ``chunks.attend``, with about twice the products.
    """
    return _Attend.apply(q, k, v, read, erase, log_decay, state, mask, segments, scale, early, chunk)


class _Attend(torch.autograd.Function):
    """Takes the arguments of ``_forward``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        # One operation for torch.compile, since tracing its inside gains nothing.
        run = _forward_op if torch.compiler.is_compiling() else _forward
        o, end, starts = run(*given)
        ctx.save_for_backward(*given[:9], starts)
        ctx.options = given[9:]
        return o, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        *inputs, mask, segments, _ = saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            scale, early, chunk = ctx.options
            options: dict[str, Any] = {"mask": mask, "segments": segments, "scale": scale}
            grads = double_backward(composed, inputs, upstream, **options, early=early, chunk=chunk)
        else:
            run: Any = _backward_op if torch.compiler.is_compiling() else _backward
            found = iter(run(*upstream, *saved, *ctx.options))
            grads = [None if t is None else next(found) for t in inputs]
        return (*grads, None, None, None, None, None)


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


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _spans_of(
    place: Place,
    inputs: Inputs,
    mask: Tensor | None,
    segments: Tensor | None,
    wide: torch.dtype,
    early: bool,
) -> tuple[Span, Reads]:
    """Return the span at ``place`` of q, k, v, read, erase and log_decay."""
    q, k, v, read, erase, log_decay = inputs
    span = chunks._span(place, (q, k, v, log_decay, None), mask, segments, wide, chunks._form(q, False))
    pair = chunks._span(place, (read, erase, v[..., :0], None, None), mask, segments, wide, chunks._form(q, False))
    early = early and log_decay is not None
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


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    early: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E), the state before each span but the first."""
    places, inputs = chunks._chunk_spans(q, v, v, chunk), (q, k, v, read, erase, log_decay)

    def advance(place: Place, before: Tensor) -> tuple[Tensor, Tensor]:
        return _advance(*_spans_of(place, inputs, mask, segments, state.dtype, early), before, scale)

    with torch.autocast(q.device.type, enabled=False):
        o, end, starts = spans.forward(advance, places, v, state, k.shape[1])
    spans.clear_masked(mask, o)
    return o, end, starts


def _backward(
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    starts: Tensor,
    scale: float,
    early: bool,
    chunk: int,
) -> list[Tensor]:
    """Return the gradients of q, k, v, read and erase, of log_decay if given, and of the first state."""
    places, wide, form = chunks._chunk_spans(q, v, v, chunk), state.dtype, chunks._form(q, False)
    inputs = (q, k, v, read, erase, log_decay)
    grads = [None if t is None else torch.empty_like(t) for t in inputs]

    def retreat(place: Place, start: Tensor, after: Tensor) -> tuple[list[Tensor | None], Tensor]:
        span, reads = _spans_of(place, inputs, mask, segments, wide, early)
        upstream = chunks._span(place, (q, k, grad, None, None), mask, None, wide, form).v * scale
        return _retreat(span, reads, start, upstream, after, decays=log_decay is not None)

    with torch.autocast(q.device.type, enabled=False):
        first = spans.backward(retreat, places, grads, state, starts, grad_end, k.shape[1])
    found = [t for t in grads if t is not None]
    spans.clear_masked(mask, *found)
    return [*found, first]


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    early: bool,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The forward pass from operations with derivatives of any order."""
    places, inputs = chunks._chunk_spans(q, v, v, chunk), (q, k, v, read, erase, log_decay)

    def advance(place: Place, before: Tensor) -> tuple[Tensor, Tensor]:
        return _advance(*_spans_of(place, inputs, mask, segments, state.dtype, early), before, scale)

    with torch.autocast(q.device.type, enabled=False):
        return spans.composed(advance, places, v, state, k.shape[1], mask)


_forward_op = torch.library.custom_op("longspan::general_chunks_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::general_chunks_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, _, _, _, state, *_, chunk = given
    starts = state.new_empty(len(chunks._chunk_spans(q, v, v, chunk)) - 1, *state.shape)
    return torch.empty_like(v), torch.empty_like(state, memory_format=torch.contiguous_format), starts


@_backward_op.register_fake
def _(*given: Any) -> list[Tensor]:
    _, _, *inputs, state = given[:9]
    found = [torch.empty_like(t) for t in inputs if t is not None]
    return [*found, torch.empty_like(state, memory_format=torch.contiguous_format)]
