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

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import triton
from ..operands import double_backward, needs_autograd
from ..segments import borders_of, cut
from . import decay_per_head, pairs, spans
from .decay_per_channel import before_here, from_here_on, halved, halved_backward, running
from .decays import LOWEST, faded
from .spans import Place

CHUNK = 64
SPAN = 8192  # tokens of a span, over all rows and heads
GROUP = 32  # chunks whose states form one product
# Tokens of a span on a GPU, over all rows and heads. A span takes up to some hundred launches, which cost as much as
# the work on this many tokens; its intermediate results take about 4 kB per token, for D = E = 64.
TOGETHER = 2**18

Form = Literal["loop", "pairs", "triton"]  # how the states of a span are computed


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    segments: Tensor | None,
    chunk: int = CHUNK,
    kernels: bool = False,
) -> tuple[Tensor, Tensor]:
    """``gated.recur`` in chunks; ``chunk`` is a power of two. With ``kernels`` Triton computes the states.

    Time is O(N (D E + C (D + E))); a decay per channel adds D log C exponentials per token. Beyond inputs, output and
    gradients, memory is that of one span, and of D E numbers per span for the backward pass.
    """
    return _Attend.apply(q, k, v, log_decay, beta, state, mask, segments, scale, chunk, kernels)


class _Attend(torch.autograd.Function):
    """Takes the arguments of ``_forward``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        # One operation for torch.compile, since tracing its inside gains nothing.
        run = _forward_op if torch.compiler.is_compiling() else _forward
        o, end, starts = run(*given)
        ctx.save_for_backward(*given[:8], starts)
        ctx.options = given[8:]
        return o, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        *inputs, mask, segments, _ = saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            scale, chunk, _ = ctx.options
            options: dict[str, Any] = {"mask": mask, "segments": segments, "scale": scale, "chunk": chunk}
            grads = double_backward(composed, inputs, upstream, **options)
        else:
            run: Any = _backward_op if torch.compiler.is_compiling() else _backward
            found = iter(run(*upstream, *saved, *ctx.options))
            grads = [None if t is None else next(found) for t in inputs]
        return (*grads, None, None, None, None, None)


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


def _span(
    place: Place,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    mask: Tensor | None,
    segments: Tensor | None,
    wide: torch.dtype,
    form: Form,
) -> Span:
    """Return the span at ``place``, padded with tokens that have no effect."""
    start, count, width = place
    q, k, v, log_decay, beta = inputs
    groups, rows = k.shape[1], slice(start, start + count * width)
    hidden = None if mask is None else ~mask[:, None, rows, None]
    more = (1 << (width - 1).bit_length()) - width

    def chunks(x: Tensor) -> Tensor:
        x = x[:, :, rows].to(wide)
        x = x if hidden is None else x.masked_fill(hidden, 0.0)
        x = x.unflatten(2, (count, width)).unflatten(1, (groups, x.shape[1] // groups))
        return (F.pad(x, (0, 0, 0, more)) if more else x).contiguous()

    span = Span(form, chunks(q), chunks(k), chunks(v), None, None, None, None, None, None, None)
    if beta is not None:
        span.beta = chunks(beta[..., None])
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


def _form(q: Tensor, kernels: bool) -> Form:
    return "triton" if kernels else "pairs" if _on_gpu(q) else "loop"


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


def _chunk_spans(q: Tensor, v: Tensor, beta: Tensor | None, chunk: int) -> list[Place]:
    n, rows = q.shape[2], max(v.shape[0] * v.shape[1], 1)
    if _on_gpu(q):
        return cut(n, chunk, max(TOGETHER // rows, 8 * chunk))
    tokens = SPAN // rows
    # Without the delta rule the states of a span form one product, quadratic in the number of chunks.
    return cut(n, chunk, tokens if beta is not None else min(tokens, GROUP * chunk))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    chunk: int,
    kernels: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E), the state before each span but the first."""
    places, form = _chunk_spans(q, v, beta, chunk), _form(q, kernels)
    with torch.autocast(q.device.type, enabled=False):
        if beta is None and log_decay is not None and log_decay.dim() == 3 and form == "loop":
            o, end, starts = decay_per_head.forward(q, k, v, log_decay, state, mask, segments, scale, places)
        else:
            inputs = q, k, v, log_decay, beta

            def advance(place: Place, before: Tensor) -> tuple[Tensor, Tensor]:
                return _advance(_span(place, inputs, mask, segments, state.dtype, form), before, scale)

            o, end, starts = spans.forward(advance, places, v, state, k.shape[1])
    spans.clear_masked(mask, o)
    return o, end, starts


def _backward(
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    starts: Tensor,
    scale: float,
    chunk: int,
    kernels: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, of log_decay and beta if given, and of the first state."""
    places, wide, form = _chunk_spans(q, v, beta, chunk), state.dtype, _form(q, kernels)
    inputs = q, k, v, log_decay, beta
    grads = [None if t is None else torch.empty_like(t) for t in inputs]

    def retreat(place: Place, start: Tensor, after: Tensor) -> tuple[list[Tensor | None], Tensor]:
        span = _span(place, inputs, mask, segments, wide, form)
        upstream = _span(place, (q, k, grad, None, None), mask, None, wide, form).v * scale
        return _retreat(span, start, upstream, after, decays=log_decay is not None)

    with torch.autocast(q.device.type, enabled=False):
        first = spans.backward(retreat, places, grads, state, starts, grad_end, k.shape[1])
    found = [t for t in grads if t is not None]
    spans.clear_masked(mask, *found)
    return [*found, first]


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The forward pass from operations with derivatives of any order."""
    places, inputs, form = _chunk_spans(q, v, beta, chunk), (q, k, v, log_decay, beta), _form(q, False)

    def advance(place: Place, before: Tensor) -> tuple[Tensor, Tensor]:
        return _advance(_span(place, inputs, mask, segments, state.dtype, form), before, scale)

    with torch.autocast(q.device.type, enabled=False):
        return spans.composed(advance, places, v, state, k.shape[1], mask)


_forward_op = torch.library.custom_op("longspan::chunks_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::chunks_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, _, beta, state, _, _, _, chunk, _ = given
    starts = state.new_empty(len(_chunk_spans(q, v, beta, chunk)) - 1, *state.shape)
    return torch.empty_like(v), torch.empty_like(state, memory_format=torch.contiguous_format), starts


@_backward_op.register_fake
def _(*given: Any) -> list[Tensor]:
    _, _, q, k, v, log_decay, beta, state, *_ = given
    found = [torch.empty_like(t) for t in (q, k, v, log_decay, beta) if t is not None]
    return [*found, torch.empty_like(state, memory_format=torch.contiguous_format)]
