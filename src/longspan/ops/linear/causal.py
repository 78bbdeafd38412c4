"""Causal linear attention on queries and keys before the feature map, span by span, so that data stays in the cache.

A span is a number of chunks of tokens. Inside it, the feature map, the products and the normalizer work on buffers that
all spans share. The state S = sum phi(k) v^T, z = sum phi(k) passes from span to span. The backward pass saves q, k, v,
o, the denominators and one state per span, and recomputes the rest.

``G`` is the number of chunks of a span and ``R`` = G B H the number of its matrices, chunk by chunk. Tokens are
(R,C,D); the states before the chunks and after the last are ((G+1) B H,D,E). Products need no copies in this layout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers import Buffers, fresh_like
from ..custom_ops import kernel
from ..segments import cut
from .composed import composed, quadratic
from .features import divisors
from .operands import LinearOperands
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


def attend(r: LinearOperands) -> tuple[Tensor, Tensor]:
    """Causal, normalized linear attention: o_t = S_t^T phi(q_t) / (z_t . phi(q_t) + eps).

    Time is O(N (D E + C (D + E))). Beyond inputs, output and gradients, memory is that of one span, and of D E numbers
    per span for the backward pass. On a GPU a sequence is cut into few spans, since each needs launches, and for inputs
    in bfloat16, products are sums of products of bfloat16. Sequences of at most
    2 (C + D E / (D + E)) tokens use the quadratic form, on a GPU only small ones, since it takes more memory. Up to
    half of that, it needs fewer operations than the chunks; up to all of that, it is faster because it has fewer steps.

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 8-15.
    """
    n, d, e = *r.q.shape[2:], r.v.shape[-1]
    chunk = r.chunk or (WIDE if _on_gpu(r.q) else CHUNK)
    small = not _on_gpu(r.q) or r.q.shape[0] * r.q.shape[1] * n <= LEAST
    if small and n * (d + e) <= 2 * (chunk * (d + e) + d * e):
        return quadratic(r)
    return _attend(r._replace(chunk=chunk))


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


def _forward(r: LinearOperands, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E+1), denominators (B,H,N,1), the state before each span but the first."""
    q, k, v, state, mask, segments, feature_map, eps, _, chunk = r
    o, end, below = outputs(q, v)
    end.copy_(state) if state is not None else end.zero_()
    parts, spans = _plan(q, v, segments, chunk)
    starts = end.new_empty(len(spans) - 1, *end.shape)
    tensors = {"q": q, "k": k, "v": v, "o": o, "below": below}
    how = Buffers(end), feature_map, spans
    gpu, kind = _on_gpu(q), _operands(q, v)
    with torch.autocast(q.device.type, enabled=False):
        for part in parts:
            rows, after = Rows(*how, part, mask, segments, tensors, gpu=gpu, operands=kind), end[part].flatten(0, 1)
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
    r: LinearOperands, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of q, k, v and the first state, last span first."""
    q, k, v, state, mask, segments, feature_map, _, _, chunk = r
    (grad, grad_end), (o, below, starts) = grads, kept
    dq, dk, dv = fresh_like(q), fresh_like(k), fresh_like(v)
    before = grad_end.clone(memory_format=torch.contiguous_format)
    parts, spans = _plan(q, v, segments, chunk)
    how = Buffers(before), feature_map, spans
    gpu, kind = _on_gpu(q), _operands(q, v)
    tensors = {"q": q, "k": k, "v": v, "o": o, "below": below, "grad": grad, "dq": dq, "dk": dk, "dv": dv}
    with torch.autocast(q.device.type, enabled=False):
        for part in parts:
            rows, after = Rows(*how, part, mask, segments, tensors, gpu=gpu, operands=kind), before[part].flatten(0, 1)
            for i in reversed(range(len(spans))):
                start = starts[i - 1] if i > 0 else state
                _backward_span(rows, spans[i], None if start is None else start[part].flatten(0, 1), after)
    return [dq, dk, dv, before if state is None else before.to(state.dtype)]


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


def _shapes(r: LinearOperands, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, end, below = outputs(r.q, r.v)
    _, spans = _plan(r.q, r.v, r.segments, r.chunk)
    return o, end, below, end.new_empty(len(spans) - 1, *end.shape)


# One operation for torch.compile, since tracing its inside gains nothing.
_attend = kernel(
    "spans",
    LinearOperands,
    _forward,
    _backward,
    shapes=_shapes,
    again=composed,
    inputs=4,
    kept=2,
    saves=1,
)
