"""Causal linear attention on queries and keys before the feature map, span by span, so that data stays in the cache.

A span is a number of chunks of tokens. Inside it, the feature map, the products and the normalizer work on buffers that
all spans share. The state S = sum phi(k) v^T, z = sum phi(k) passes from span to span. The backward pass saves q, k, v,
o, the denominators and one state per span, and recomputes the rest.

``G`` is the number of chunks of a span and ``R`` = G B H the number of its matrices, chunk by chunk. Tokens are
(R,C,D); the states before the chunks and after the last are ((G+1) B H,D,E). Products need no copies in this layout.
"""

from typing import Any

import torch
from torch import Tensor

from ..buffers import Buffers, fresh_like
from ..operands import double_backward
from ..segments import cut
from .composed import composed, quadratic
from .features import divisors
from .workspace import Rows, groups, narrow_products, outputs

# Tokens whose products form one small matrix: in half as many, half as much is computed in vain, and twice as many
# states are read and written. That is faster where MKL multiplies without AVX-512.
CHUNK = 32 if narrow_products() else 64
WIDE = 64  # the same on a GPU
SPAN = 1024  # tokens of a span, at most
# Bytes for the buffers of a span. Each is written and read several times, so a few should fit in the cache of a core.
BUDGET = 21 * 2**18
# Chunks of a span on a GPU for packed sequences, whose states are summed by a matrix of (G+1)^2 numbers.
PACKED = 128
# Tokens of a span on a GPU, of all rows and heads together: about a sixth of all, so that its buffers, nine times as
# large as its share of the inputs, take about twice the memory of the inputs. With fewer than the least, a launch costs
# more than its work; with more than the most, launches are few enough.
PARTS, LEAST, MOST = 6, 2**15, 2**18


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    eps: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal, normalized linear attention: o_t = S_t^T phi(q_t) / (z_t . phi(q_t) + eps).

    Time is O(N (D E + C (D + E))). Beyond inputs, output and gradients, memory is that of one span, and of D E numbers
    per span for the backward pass. On a GPU a sequence is cut into few spans, since each needs launches, and for inputs
    in bfloat16, products are sums of products of bfloat16. Sequences of at most
    2 (C + D E / (D + E)) tokens use the quadratic form, on a GPU only small ones, since it takes more memory. Up to
    half of that, it needs fewer operations than the chunks; up to all of that, it is faster because it has fewer steps.

    Args:
        q: (B,H,N,D), before the feature map, of any strides.
        k: (B,H,N,D), before the feature map.
        v: (B,H,N,E), of the same dtype.
        feature_map: A name in ``features.MAPS``.
        eps: Added to the denominator.
        mask: (B,N) bool, True = a real token. Keys and values of masked tokens are ignored, even if not finite.
        segments: (B,N) int64, packed sequences, as in ``recurrence.scan``.
        state: (B,H,D,E+1), whose last column is z, or None for zeros.
        chunk: Tokens of a chunk; None chooses by the device and processor.

    Returns:
        o (B,H,N,E) in v's dtype and the state (B,H,D,E+1) in float32 or float64.

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 8-15.
    """
    n, d, e = *q.shape[2:], v.shape[-1]
    chunk = chunk or (WIDE if _on_gpu(q) else CHUNK)
    small = not _on_gpu(q) or q.shape[0] * q.shape[1] * n <= LEAST
    if small and n * (d + e) <= 2 * (chunk * (d + e) + d * e):
        return quadratic(q, k, v, state, feature_map, eps, mask, segments)
    return _Attend.apply(q, k, v, state, mask, segments, feature_map, eps, chunk)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor | None,
        mask: Tensor | None,
        segments: Tensor | None,
        feature_map: str,
        eps: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        # One operation for torch.compile, since tracing its inside gains nothing.
        run = _forward_op if torch.compiler.is_compiling() else _forward
        o, end, below, starts = run(q, k, v, state, mask, segments, feature_map, eps, chunk)
        ctx.save_for_backward(q, k, v, state, mask, segments, o, below, starts)
        ctx.options = feature_map, eps, chunk
        return o, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        grad, grad_end = upstream
        q, k, v, state, mask, segments, o, below, starts = ctx.saved_tensors
        feature_map, eps, chunk = ctx.options
        if torch.is_grad_enabled():
            options: dict[str, Any] = {"feature_map": feature_map, "eps": eps, "mask": mask, "segments": segments}
            grads = double_backward(composed, (q, k, v, state), (grad, grad_end), causal=True, **options)
        else:
            run = _backward_op if torch.compiler.is_compiling() else _backward
            *grads, before = run(grad, grad_end, q, k, v, state, mask, segments, o, below, starts, feature_map, chunk)
            grads.append(None if state is None else before)
        return (*grads, None, None, None, None, None)


def _on_gpu(x: Tensor) -> bool:
    """Return whether to plan for a GPU."""
    return x.is_cuda


def _operands(q: Tensor, v: Tensor) -> torch.dtype | None:
    """Return the dtype of v if operands of products are split into such numbers; None if they are not.

    A GPU multiplies bfloat16 many times as fast as float32, with sums in float32. Two of these numbers have 16 of the
    24 digits of float32, which is more than the outputs have. The range of float16 is too small for sums of features.
    """
    exists = "dtype_out" in torch.ops.aten.bmm.overloads() and "dtype_out" in torch.ops.aten.baddbmm.overloads()
    return torch.bfloat16 if _on_gpu(q) and exists and q.dtype == v.dtype == torch.bfloat16 else None


def _plan(q: Tensor, v: Tensor, segments: Tensor | None, chunk: int) -> tuple[list[slice], list[tuple[int, int, int]]]:
    """Return the groups of rows to process together, and the spans (start, chunks, tokens per chunk)."""
    (batch, heads, n, d), e = q.shape, v.shape[-1]
    if _on_gpu(q):
        together = min(max(batch * heads * n // PARTS, LEAST), MOST)
        # A state per span is kept, so spans are long, and short sequences are processed by groups of rows.
        tokens = max(together // max(batch * heads, 1), 8 * chunk)
        spans = cut(n, chunk, tokens if segments is None else min(tokens, PACKED * chunk))
        return groups(batch, together // (max(heads, 1) * spans[0][1] * spans[0][2])), spans
    tokens = BUDGET // (4 * heads * (2 * d + 2 * e + chunk))
    spans = cut(n, chunk, min(tokens, SPAN))
    return groups(batch, tokens // (spans[0][1] * spans[0][2])), spans


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    feature_map: str,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E+1), denominators (B,H,N,1), the state before each span but the first."""
    o, end, below = outputs(q, v)
    end.copy_(state) if state is not None else end.zero_()
    parts, spans = _plan(q, v, segments, chunk)
    starts = end.new_empty(len(spans) - 1, *end.shape)
    tensors = {"q": q, "k": k, "v": v, "o": o, "below": below}
    how = Buffers(end), feature_map, spans
    options: dict[str, Any] = {"gpu": _on_gpu(q), "operands": _operands(q, v)}
    with torch.autocast(q.device.type, enabled=False):
        for part in parts:
            rows, after = Rows(*how, part, mask, segments, tensors, **options), end[part].flatten(0, 1)
            for i, span in enumerate(spans):
                if i > 0:
                    starts[i - 1, part] = end[part]
                _forward_span(rows, span, after, eps)
    return o, end, below, starts


def _forward_span(rows: Rows, span: tuple[int, int, int], end: Tensor, eps: float) -> None:
    """Process one span; ``end`` (B H,D,E+1) holds the state before it and is updated in place."""
    rows.enter(*span)
    fq, fk, values = rows.features("q"), rows.features("k"), rows.values()
    d, e = fk.shape[-1], values.shape[-1]
    scores = rows.causal(rows.product(fq, fk.mT, rows.tokens("scores", rows.width)))
    below = torch.sum(scores, -1, keepdim=True, out=rows.tokens("below", 1))
    above = rows.product(scores, values, rows.tokens("above", e))
    written = rows.written(fk)
    sums, keys = rows.states("s", d, e), rows.states("z", 1, d)
    sums[: rows.heads].copy_(end[..., :-1])
    keys[: rows.heads].copy_(end[..., -1:].mT)
    rows.product(written.mT, values, sums[rows.heads :])
    torch.sum(written, -2, keepdim=True, out=keys[rows.heads :])
    sums, keys = rows.running(sums, "s"), rows.running(keys, "z")
    read = rows.read(fq)
    rows.add_product(above, read, sums[: -rows.heads])
    rows.add_dots(below, read, keys[: -rows.heads])
    low = torch.add(rows.wide(below), eps, out=rows.at("below"))
    if eps == 0:
        low.copy_(divisors(low))
    torch.div(rows.wide(above), low, out=rows.at("o"))
    end[..., :-1].copy_(sums[-rows.heads :])
    end[..., -1:].copy_(keys[-rows.heads :].mT)


def _backward(
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    o: Tensor,
    below: Tensor,
    starts: Tensor,
    feature_map: str,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the first state from those of o and the last state, last span first."""
    dq, dk, dv = fresh_like(q), fresh_like(k), fresh_like(v)
    before = grad_end.clone(memory_format=torch.contiguous_format)
    parts, spans = _plan(q, v, segments, chunk)
    how = Buffers(before), feature_map, spans
    options: dict[str, Any] = {"gpu": _on_gpu(q), "operands": _operands(q, v)}
    tensors = {"q": q, "k": k, "v": v, "o": o, "below": below, "grad": grad, "dq": dq, "dk": dk, "dv": dv}
    with torch.autocast(q.device.type, enabled=False):
        for part in parts:
            rows, after = Rows(*how, part, mask, segments, tensors, **options), before[part].flatten(0, 1)
            for i in reversed(range(len(spans))):
                start = starts[i - 1] if i > 0 else state
                _backward_span(rows, spans[i], None if start is None else start[part].flatten(0, 1), after)
    return dq, dk, dv, before if state is None else before.to(state.dtype)


def _backward_span(rows: Rows, span: tuple[int, int, int], start: Tensor | None, after: Tensor) -> None:
    """Process one span of the gradients.

    ``start`` (B H,D,E+1) is the state before the span, None for zeros. ``after``, of the same shape, holds the gradient
    of the state after it and is updated in place to that of the state before it. The denominator is one more column of
    values, all ones, and ``below`` the gradient in that column.
    """
    rows.enter(*span)
    fq, fk, values = rows.features("q"), rows.features("k"), rows.values()
    d, e, heads = fk.shape[-1], values.shape[-1], rows.heads
    above, below = rows.output_gradients()
    slopes = rows.causal(rows.product(above, values.mT, rows.tokens("slopes", rows.width)).add_(below))
    scores = rows.causal(rows.product(fq, fk.mT, rows.tokens("scores", rows.width)))

    # Queries meet the states before their chunk, stored transposed for the product.
    written = rows.written(fk)
    sums, keys = rows.states("s", e, d), rows.states("z", 1, d)
    for into, column in ((sums, slice(None, -1)), (keys, slice(-1, None))):
        into[:heads].zero_() if start is None else into[:heads].copy_(start[..., column].mT)
    rows.product(values.mT, written, sums[heads:])
    torch.sum(written, -2, keepdim=True, out=keys[heads:])
    sums, keys = rows.running(sums, "s"), rows.running(keys, "z")
    dq = torch.mul(below, keys[:-heads], out=rows.tokens("dq", d))
    rows.add_product(dq, above, sums[:-heads])
    rows.add_product(rows.times_first(dq), slopes, fk)

    # Keys and values meet the gradients of the states after their chunk.
    read = rows.read(fq)
    sums, keys = rows.states("s", d, e), rows.states("z", 1, d)
    sums[-heads:].copy_(after[..., :-1])
    keys[-heads:].copy_(after[..., -1:].mT)
    rows.product(read.mT, above, sums[:-heads])
    torch.bmm(below.mT, read, out=keys[:-heads])
    sums, keys = rows.running(sums, "s", reverse=True), rows.running(keys, "z", reverse=True)
    after[..., :-1].copy_(sums[:heads])
    after[..., -1:].copy_(keys[:heads].mT)
    dk, dv = rows.tokens("dk", d), rows.tokens("dv", e)
    dk.copy_(keys[heads:].expand_as(dk))
    later = sums[heads:]
    rows.add_product(rows.times_last(rows.add_product(dk, values, later.mT)), slopes.mT, fq)
    rows.add_product(rows.times_last(rows.product(fk, later, dv)), scores.mT, above)

    rows.store("q", dq, fq)
    rows.store("k", dk, fk)
    rows.at("dv").copy_(rows.wide(dv))


_forward_op = torch.library.custom_op("longspan::spans_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::spans_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    feature_map: str,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, end, below = outputs(q, v)
    _, spans = _plan(q, v, segments, chunk)
    return o, end, below, end.new_empty(len(spans) - 1, *end.shape)


@_backward_op.register_fake
def _(
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    o: Tensor,
    below: Tensor,
    starts: Tensor,
    feature_map: str,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    before = torch.empty_like(grad_end, memory_format=torch.contiguous_format)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), before if state is None else before.to(state)
