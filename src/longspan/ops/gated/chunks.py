"""The recurrence of ``gated`` in chunks: matrix products inside a chunk, the state from chunk to chunk.

With G_i the sum of the log decays of a chunk up to token i, and S the state before the chunk,

    A_ij = sum_d q_id k_jd e^(G_id - G_jd), j <= i           U = T^-1 diag(beta) V
    B_ij = sum_d k_id k_jd e^(G_id - G_jd), j < i            W = T^-1 diag(beta) (e^G K)
    T    = I + diag(beta) B                                  V' = U - W S
    O    = (e^G Q) S + A V'                                  S' = e^(G_C) S + (e^(G_C - G) K)^T V'

and V' = V without the delta rule (Yang et al. 2024, 2406.06484, eqs 7-11, and 2412.06464, section 3.3; Kimi Team 2025,
2510.26692, section 3). No exponent is positive if no log decay is, and e^-G is never formed.

The states come from one of three forms. On a CPU a loop over chunks is the fastest. On a GPU each operation of a loop
is a launch, so pairs of chunks are joined, pairs of pairs, and so on (``pairs``); or one Triton kernel does the whole
loop (``ops/triton/delta.py``).

Axes: B batch, G query and key heads, R value heads per key head, L chunks of a span, C tokens of a chunk.
Queries and keys are (B,G,1,L,C,D), values (B,G,R,L,C,E), log decays (B,G,R,L,C,1 or D), states (B,G,R,D,E).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import triton
from ..custom_ops import kernel
from ..operands import needs_autograd, transformed, zero_masked
from ..segments import borders_of, cut
from . import decay_per_head, pairs, spans
from .decay_per_channel import before_here, from_here_on, halved, halved_backward, running
from .decays import LOWEST, faded
from .operands import Recurrence, prepared
from .spans import Place

CHUNK = 64
SPAN = 8192  # tokens of a span, over all rows and heads
GROUP = 32  # chunks whose states form one product
# Tokens of a span on a GPU, over all rows and heads. A span takes up to some hundred launches, which cost as much as
# the work on this many tokens; its intermediate results take about 4 kB per token, for D = E = 64.
TOGETHER = 2**18

Form = Literal["loop", "pairs", "triton"]  # how the states of a span are computed


class Chunked(NamedTuple):
    """Operands as in ``Recurrence``, normalized and of one sequence per row, and how to compute."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    state: Tensor
    mask: Tensor | None
    segments: Tensor | None
    scale: float
    chunk: int = CHUNK  # tokens of a chunk, a power of two
    kernels: bool = False  # whether Triton computes the states

    @property
    def form(self) -> Form:
        return "triton" if self.kernels else "pairs" if _on_gpu(self.q) else "loop"

    @property
    def places(self) -> list[Place]:
        """The spans of the sequence."""
        n, rows = self.q.shape[2], max(self.v.shape[0] * self.v.shape[1], 1)
        if _on_gpu(self.q):
            return cut(n, self.chunk, max(TOGETHER // rows, 8 * self.chunk))
        tokens = SPAN // rows
        # Without the delta rule the states of a span form one product, quadratic in the number of chunks.
        return cut(n, self.chunk, tokens if self.beta is not None else min(tokens, GROUP * self.chunk))


def attend(r: Recurrence) -> tuple[Tensor, Tensor]:
    """``gated.serve`` in chunks, in operations of torch.

    Time is O(N (D E + C (D + E))); a decay per channel adds D log C exponentials per token. Beyond inputs, output and
    gradients, memory is that of one span, and of D E numbers per span for the backward pass.
    """
    if not r.v.numel() or not r.q.shape[2]:
        return torch.zeros_like(r.v), r.state.clone()
    return prepared(composed if transformed() else chunked, r)


def chunked(r: Recurrence, *, chunk: int = CHUNK, kernels: bool = False) -> tuple[Tensor, Tensor]:
    """``attend`` without ``normalize`` and ``cu_seqlens``. With ``kernels`` Triton computes the states."""
    return in_spans(Chunked(*r[:8], r.scale, chunk, kernels))


def composed(r: Recurrence, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """``chunked`` from operations with derivatives of any order."""
    return _composed(Chunked(*r[:8], r.scale, chunk))


def step(r: Recurrence, donate: bool) -> tuple[Tensor, Tensor]:
    """``gated.serve`` for N = 1, in few passes over the state, which ``donate`` overwrites."""
    return prepared(partial(_step, donate=donate), r)


def _step(r: Recurrence, donate: bool) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, beta, state, mask, _, _, scale, _ = r
    wide, groups = state.dtype, v.shape[1] // k.shape[1]
    # A masked token neither decays nor writes, and reads 0.
    q, k, v, log_decay, beta = zero_masked(mask, q, k, v, log_decay, beta)
    queries, keys, new = q.to(wide) * scale, k.to(wide), v.to(wide)
    if groups > 1:
        queries, keys = queries.repeat_interleave(groups, 1), keys.repeat_interleave(groups, 1)
    if log_decay is not None:
        alpha = log_decay.to(wide).clamp(min=LOWEST).exp()
        alpha = alpha.mT if log_decay.dim() == 4 else alpha[..., None]
        state = state.mul_(alpha) if donate else state * alpha
        donate = donate or not (torch.is_grad_enabled() or transformed())
    if beta is not None:
        new = beta[..., None].to(wide) * (new - keys @ state)
    state = state.addcmul_(keys.mT, new) if donate else torch.addcmul(state, keys.mT, new)
    return (queries @ state).to(v.dtype), state


@dataclass
class Span:
    """The chunks of a span in float32 or float64, with the factors of decay and segments."""

    form: Form
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None  # (B,G,R,L,C,1)
    log_decays: Tensor | None  # log decays per channel; else None
    same: Tensor | None  # (B,1,1,L,C,C) query and key lie in one segment
    weight: Tensor | None  # (...,C,C) e^(G_i - G_j) for j <= i, else 0; None for 1, or per channel
    entering: Tensor | None  # (...,C,1|D) the remaining share of the state before the chunk; None for 1
    leaving: Tensor | None  # (...,C,1|D) the remaining share of a token after the chunk
    whole: Tensor | None  # (...,1|D,1) the share of the state before the chunk that remains after it

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Return sum_d a_id b_jd e^(G_id - G_jd) for j <= i, else 0: (...,C,D) twice -> (...,C,C)."""
        if self.log_decays is not None:
            out = halved(a, b, self.log_decays)
            return out if self.same is None else out * self.same
        out = a @ b.mT
        return out.tril() if self.weight is None else out * self.weight

    def products_backward(self, grad: Tensor, a: Tensor, b: Tensor, products: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a, b and the log decays (...,C,1|D) per value head, given that of ``products``."""
        if self.log_decays is not None:
            return halved_backward(grad if self.same is None else grad * self.same, a, b, self.log_decays)
        # The decay of token t affects the pairs j < t <= i. Summing only these avoids a difference of large sums.
        decay = before_here((grad * products).tril(-1).mT).mT.tril().sum(-2)[..., None]
        grad = grad.tril() if self.weight is None else grad * self.weight
        return grad @ b, grad.mT @ a, decay


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return x * factor, where None stands for 1."""
    return x if factor is None else x * factor


def _span(r: Chunked, place: Place) -> Span:
    """Return the span at ``place``, padded with tokens that have no effect."""
    start, count, width = place
    groups, rows, wide = r.k.shape[1], slice(start, start + count * width), r.state.dtype
    log_decay, segments = r.log_decay, r.segments
    hidden = None if r.mask is None else ~r.mask[:, None, rows, None]
    more = (1 << (width - 1).bit_length()) - width

    def chunks(x: Tensor) -> Tensor:
        x = x[:, :, rows].to(wide)
        x = x if hidden is None else x.masked_fill(hidden, 0.0)
        x = x.unflatten(2, (count, width)).unflatten(1, (groups, x.shape[1] // groups))
        return (F.pad(x, (0, 0, 0, more)) if more else x).contiguous()

    span = Span(r.form, chunks(r.q), chunks(r.k), chunks(r.v), None, None, None, None, None, None, None)
    if r.beta is not None:
        span.beta = chunks(r.beta[..., None])
    borders = None
    if segments is not None:
        ids = segments[:, start : start + count * width]
        ids = ids if not more else torch.cat([ids, ids[:, -1:].expand(-1, more)], 1)
        # The token before the span is prepended, so that a border at the start of the span is visible.
        ids = torch.cat([segments[:, max(start - 1, 0)][:, None], ids], 1)
        borders = [b[:, :, None] for b in borders_of(ids, 1, count, width + more, span.q)]
        span.same, span.entering, span.leaving, span.whole = borders
    if log_decay is not None:
        per_token = log_decay[..., None] if log_decay.dim() == 3 else log_decay
        log_decays = chunks(per_token).clamp(min=LOWEST)
        if log_decay.dim() == 4:
            span.log_decays = log_decays
            entering, leaving = map(faded, running(log_decays))
        else:
            total = log_decays.double().cumsum(-2)
            span.weight = _fading(total, wide)
            entering, leaving = faded(total, wide).to(wide), span.weight[..., -1, :, None]
        span.entering, span.leaving = times(entering, span.entering), times(leaving, span.leaving)
        span.whole = times(entering[..., -1:, :].mT, span.whole)
    if borders is not None and span.log_decays is None:
        span.weight = times(borders[0].tril(), span.weight)
    return span


def _fading(total: Tensor, wide: torch.dtype) -> Tensor:
    """Return e^(G_i - G_j) for j <= i, else 0, in ``wide``, from G (...,C,1) in float64: (...,C,C)."""
    lower = Tensor.tril if needs_autograd(total) else Tensor.tril_
    return lower(
        faded(lower(decay_per_head.differences(*decay_per_head.split(total, wide))))
    )  # above the diagonal they could overflow


def _on_gpu(x: Tensor) -> bool:
    """Return whether to plan for few launches instead of small intermediate results."""
    return x.is_cuda


def _values(span: Span) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return U, W and the lower triangle of T, or T^-1 on a GPU, for the delta rule; V, None and None without it."""
    if span.beta is None:
        return span.v, None, None
    triangle = span.beta * span.products(span.k, span.k)
    right = [span.v * span.beta, (times(span.k, span.entering) * span.beta).expand(*span.v.shape[:-1], -1)]
    if span.form != "loop":
        inverse = pairs.inverted(triangle)
        return inverse @ right[0], inverse @ right[1], inverse
    solved = torch.linalg.solve_triangular(triangle, torch.cat(right, -1), upper=False, unitriangular=True)
    u, w = solved.split([span.v.shape[-1], span.k.shape[-1]], -1)
    return u, w, triangle


def _states(span: Span, u: Tensor, w: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before the chunks (B,G,R,L,D,E), the state after the last chunk, and V' (B,G,R,L,C,E)."""
    keys = times(span.k, span.leaving)
    if w is None and span.log_decays is None:
        return *_sums(keys.mT @ u, span.whole, state), u
    if span.form == "triton":
        return _scanned(span, u, w, keys, state)
    if span.form == "pairs":
        if w is None:
            return *pairs.chain(span.whole, keys.mT @ u, state), u
        states, state = pairs.chain(pairs.transition(keys, w, span.whole), keys.mT @ u, state)
        return states, state, u - w @ states
    keys = keys.mT
    parts = keys @ u if w is None else None
    states, values = [], []
    for i in range(u.shape[3]):
        states.append(state)
        kept = state if span.whole is None else state * span.whole[:, :, :, i]
        if w is None:
            assert parts is not None
            state = kept + parts[:, :, :, i]
        else:
            values.append(u[:, :, :, i] - w[:, :, :, i] @ state)
            state = kept + keys[:, :, :, i] @ values[-1]
    return torch.stack(states, 3), state, u if w is None else torch.stack(values, 3)


def _scanned(span: Span, u: Tensor, w: Tensor | None, keys: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``_states`` by one Triton kernel."""
    from ..triton import delta

    operands = _flat(u), None if w is None else _flat(w), *_carried(span, keys), state.flatten(0, 2).contiguous()
    states, end, values = delta.forward(*operands, precision=triton.precision(u.dtype))
    rows = u.shape[:4]
    return states.view(*rows, *states.shape[2:]), end.view(*rows[:3], *end.shape[1:]), values.view(u.shape)


def _carried(span: Span, keys: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return keys (.,L,C,D) and the remaining shares (B G R,L,1|D) for a kernel."""
    whole = span.whole
    if whole is not None:
        whole = whole.mT.expand(*span.v.shape[:4], 1, -1)[..., 0, :].flatten(0, 2).contiguous()
    return _flat(keys), whole


def _flat(x: Tensor) -> Tensor:
    """Flatten rows and heads: (B,G,R,L,C,.) -> (B G R,L,C,.), contiguous."""
    return x.flatten(0, 2).contiguous()


def _sums(parts: Tensor, whole: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute S_l = whole_l S_(l-1) + part_l.

    parts (B,G,R,L,D,E), whole (...,L,1,1) or None for 1, state (B,G,R,D,E) -> the states before the chunks
    (B,G,R,L,D,E), the last one.
    """
    if whole is None:
        running = torch.cat([state[:, :, :, None], parts], 3).cumsum(3)
        return running[:, :, :, :-1], running[:, :, :, -1]
    found = []
    for group in parts.split(GROUP, 3):
        count, at = group.shape[3], sum(before.shape[3] for before in found)
        # The share of the state after chunk j that remains after chunk i: the product of all shares in between.
        below = parts.new_ones(count + 1, count + 1).tril(-1) > 0
        kept = F.pad(whole[:, :, :, at : at + count, 0], (0, 0, 1, 0), value=1.0)
        left = torch.where(below, kept.expand(*kept.shape[:-1], count + 1), 1.0).cumprod(-2).tril()
        all_parts = torch.cat([state[:, :, :, None], group], 3).flatten(4)
        found.append((left[..., :-1, :] @ all_parts).unflatten(-1, state.shape[3:]))
        state = (left[..., -1:, :] @ all_parts).view(state.shape)
    return torch.cat(found, 3) if len(found) > 1 else found[0], state


def _advance(span: Span, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Process one span: -> the outputs (B,G,R,L,C,E), scaled, and the state after it."""
    u, w, _ = _values(span)
    states, state, values = _states(span, u, w, state)
    inside = span.products(span.q, span.k)
    inside = inside.expand(*values.shape[:4], *inside.shape[4:])
    out = (times(span.q, span.entering) @ states).flatten(0, 3)
    add = torch.baddbmm if needs_autograd(out, inside, values) else Tensor.baddbmm_
    return add(out, inside.flatten(0, 3), values.flatten(0, 3), beta=scale, alpha=scale).view(values.shape), state


def _retreat(
    span: Span, start: Tensor, grad: Tensor, after: Tensor, *, decays: bool
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradients of one span: of q, k, v, log decays (...,C,1|D) and beta (...,C,1); of the state before it.

    start (B,G,R,D,E) is the state before the span. grad (B,G,R,L,C,E) and ``after`` (B,G,R,D,E) are the gradients of
    the outputs, times their scale, and of the state after the span.
    """
    q, k, beta = span.q, span.k, span.beta
    u, w, triangle = _values(span)
    states, _, values = _states(span, u, w, start)
    read, keys = times(q, span.entering), times(k, span.leaving)
    inside = span.products(q, k)

    grad_values, from_read = inside.mT @ grad, read.mT @ grad
    ahead, after, grad_values = _states_backward(span, grad_values, from_read, w, keys, after)

    dq, dk, decay = span.products_backward(grad @ values.mT, q, k, inside)
    from_read, out = times(grad @ states.mT, span.entering), times(values @ ahead.mT, span.leaving)
    dq, dk, dv, dbeta, reads = dq + from_read, dk + out, grad_values, None, q * from_read
    if triangle is not None:
        assert w is not None
        assert beta is not None
        right = torch.cat([grad_values, -grad_values @ states.mT], -1)
        if span.form == "loop":
            right = torch.linalg.solve_triangular(triangle.mT, right, upper=True, unitriangular=True)
        else:
            right = triangle.mT @ right
        slopes = (-right @ torch.cat([u, w], -1).mT).tril(-1)
        dv, dw = right.split([u.shape[-1], w.shape[-1]], -1)
        entering, products = times(k, span.entering), span.products(k, k)
        shares = dv * span.v, dw * entering, slopes * products
        dbeta = shares[0].sum(-1, True) + shares[1].sum(-1, True) + shares[2].sum(-1, True)
        rows, columns, between = span.products_backward(slopes * beta, k, k, products)
        from_read = times(dw * beta, span.entering)
        dk, dv, reads, decay = dk + rows + columns + from_read, dv * beta, reads + k * from_read, decay + between
    dq, dk = dq.sum(2, keepdim=True), dk.sum(2, keepdim=True)
    if not decays:
        return [dq, dk, dv, None, dbeta], after
    assert span.whole is not None
    # The decay of token t scales three parts: reads of the state before the chunk by t and later tokens, writes of
    # earlier tokens to the state after it, and the share of the first state in the second.
    writes, kept = k * out, (states * ahead).mul(span.whole).sum(-1, keepdim=True).mT
    if span.log_decays is None:
        reads, writes, kept = (t.sum(-1, keepdim=True) for t in (reads, writes, kept))
    return [dq, dk, dv, decay + from_here_on(reads) + before_here(writes) + kept, dbeta], after


def _states_backward(
    span: Span, grad_values: Tensor, from_read: Tensor, w: Tensor | None, keys: Tensor, after: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the states after the chunks (B,G,R,L,D,E), of the first state, and of V'.

    grad_values (B,G,R,L,C,E) is the gradient of V' from inside its chunk, from_read (B,G,R,L,D,E) that of the states
    before the chunks from the outputs, ``after`` (B,G,R,D,E) that of the last state.
    """
    if span.form == "triton":
        return _scanned_backward(span, grad_values, from_read, w, keys, after)
    if span.form == "pairs":
        if w is None:
            ahead, first = pairs.chain(span.whole, from_read, after, reverse=True)
            return ahead, first, grad_values + keys @ ahead
        moves = pairs.transition(w, keys, span.whole)
        ahead, first = pairs.chain(moves, from_read - w.mT @ grad_values, after, reverse=True)
        return ahead, first, grad_values + keys @ ahead
    # From the last chunk to the first; ``ahead`` is the gradient of the state after each.
    ahead, found = [], []
    for i in reversed(range(grad_values.shape[3])):
        ahead.append(after)
        before = from_read[:, :, :, i] + (after if span.whole is None else after * span.whole[:, :, :, i])
        if w is not None:
            found.append(grad_values[:, :, :, i] + keys[:, :, :, i] @ after)
            before = before - w[:, :, :, i].mT @ found[-1]
        after = before
    ahead = torch.stack(ahead[::-1], 3)
    return ahead, after, grad_values + keys @ ahead if w is None else torch.stack(found[::-1], 3)


def _scanned_backward(
    span: Span, grad_values: Tensor, from_read: Tensor, w: Tensor | None, keys: Tensor, after: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``_states_backward`` by one Triton kernel."""
    from ..triton import delta

    grads, last = (_flat(grad_values), _flat(from_read)), after.flatten(0, 2).contiguous()
    found = delta.backward(
        *grads,
        None if w is None else _flat(w),
        *_carried(span, keys),
        last,
        precision=triton.precision(after.dtype),
    )
    ahead, first, values = found
    ahead, first, values = ahead.view(from_read.shape), first.view(after.shape), values.view(grad_values.shape)
    return ahead, first, values + keys @ ahead if w is None else values


def _forward(r: Chunked, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E), the state before each span but the first."""
    with torch.autocast(r.q.device.type, enabled=False):
        if r.beta is None and r.log_decay is not None and r.log_decay.dim() == 3 and r.form == "loop":
            o, end, starts = decay_per_head.forward(*r[:3], r.log_decay, r.state, r.mask, r.segments, r.scale, r.places)
        else:
            o, end, starts = spans.forward(partial(_advanced, r), r)
    spans.clear_masked(r.mask, o)
    return o, end, starts


def _advanced(r: Chunked, place: Place, before: Tensor) -> tuple[Tensor, Tensor]:
    return _advance(_span(r, place), before, r.scale)


def _backward(
    r: Chunked, above: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    (grad, grad_end), (starts,) = above, kept
    upstream = r._replace(v=grad, log_decay=None, beta=None, segments=None)

    def retreat(place: Place, start: Tensor, after: Tensor) -> tuple[list[Tensor | None], Tensor]:
        scaled = _span(upstream, place).v * r.scale
        return _retreat(_span(r, place), start, scaled, after, decays=r.log_decay is not None)

    return spans.backward(retreat, r, r[:5], starts, grad_end)


def _composed(r: Chunked) -> tuple[Tensor, Tensor]:
    return spans.composed(partial(_advanced, r), r)


in_spans = kernel(
    "chunks",
    Chunked,
    _forward,
    _backward,
    shapes=spans.shapes,
    again=lambda r: _composed(r._replace(kernels=False)),
    inputs=6,
    kept=1,
)
