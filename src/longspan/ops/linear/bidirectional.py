"""Bidirectional linear attention: two products on queries and keys before the feature map, span by span."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers import Buffers, fresh_like
from ..custom_ops import kernel
from ..segments import cut
from .composed import composed
from .features import divisors
from .operands import LinearOperands
from .workspace import BUDGET, Rows, groups, outputs

SHORT = 256  # tokens up to which plain operations are used, since they are fewer


def attend(r: LinearOperands) -> tuple[Tensor, Tensor]:
    """Normalized linear attention where every query reads all keys, or all keys of its segment.

    Time is O((N + M) D E). Beyond inputs, output and gradients, memory is that of one span, except for packed
    sequences. The second result are the sums (B,H,D,E+1) over all keys.

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 4-6.
    """
    n, m = r.q.shape[2], r.k.shape[2]
    return composed(r) if r.segments is not None or max(n, m) <= SHORT or m == 0 or n == 0 else _attend(r)


def _plan(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[list[slice], list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the groups of rows to process together, and the spans of queries and of keys; each is one chunk."""
    (batch, heads, n, d), m, e = q.shape, k.shape[2], v.shape[-1]
    if q.is_cuda:
        return [slice(0, batch)], [(0, 1, n)], [(0, 1, m)]
    tokens = max(BUDGET // (4 * heads * 2 * (d + e)), 1)
    return groups(batch, tokens // max(n, m)), cut(n, tokens, 1), cut(m, tokens, 1)


def _forward(r: LinearOperands, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the sums (B,H,D,E+1), denominators (B,H,N,1)."""
    q, k, v, _, mask, _, feature_map, eps, *_ = r
    o, totals, below = outputs(q, v)
    buffers, (parts, q_spans, k_spans) = Buffers(totals), _plan(q, k, v)
    d, e = q.shape[-1], v.shape[-1]
    with torch.autocast(q.device.type, enabled=False):
        for part in parts:
            rows = Rows(buffers, feature_map, k_spans, part, mask, None, {"k": k, "v": v})
            sums = buffers("s", rows.heads, d, e).zero_()
            keys = buffers("z", rows.heads, 1, d).zero_()
            for span in k_spans:
                rows.enter(*span)
                features = rows.features("k")
                sums.baddbmm_(features.mT, rows.values())
                keys.add_(features.sum(-2, keepdim=True))
            rows = Rows(buffers, feature_map, q_spans, part, None, None, {"q": q, "o": o, "below": below})
            for span in q_spans:
                rows.enter(*span)
                features = rows.features("q")
                lower = torch.bmm(features, keys.mT, out=rows.tokens("below", 1))
                upper = torch.bmm(features, sums, out=rows.tokens("above", e))
                low = torch.add(rows.wide(lower), eps, out=rows.at("below"))
                if eps == 0:
                    low.copy_(divisors(low))
                torch.div(rows.wide(upper), low, out=rows.at("o"))
            into = totals[part].flatten(0, 1)
            into[..., :-1].copy_(sums)
            into[..., -1:].copy_(keys.mT)
    return o, totals, below


def _backward(
    r: LinearOperands, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    q, k, v, _, mask, _, feature_map, *_ = r
    (grad, grad_sums), (o, totals, below) = grads, kept
    dq, dk, dv = fresh_like(q), fresh_like(k), fresh_like(v)
    buffers, (parts, q_spans, k_spans) = Buffers(totals), _plan(q, k, v)
    d, e = q.shape[-1], v.shape[-1]
    with torch.autocast(q.device.type, enabled=False):
        for part in parts:
            tensors = {"q": q, "o": o, "below": below, "grad": grad, "dq": dq}
            rows = Rows(buffers, feature_map, q_spans, part, None, None, tensors)
            # Both are needed plain and transposed; a product with a transposed view is slow.
            given, change = totals[part].flatten(0, 1), grad_sums[part].flatten(0, 1)
            across = buffers("across", rows.heads, e, d).copy_(given[..., :-1].mT)
            keys = buffers("z", rows.heads, 1, d).copy_(given[..., -1:].mT)
            sums_change = buffers("ds", rows.heads, d, e).copy_(change[..., :-1])
            keys_change = buffers("dz", rows.heads, 1, d).copy_(change[..., -1:].mT)
            for span in q_spans:
                rows.enter(*span)
                features, (upper, lower) = rows.features("q"), rows.output_gradients()
                sums_change.baddbmm_(features.mT, upper)
                keys_change.baddbmm_(lower.mT, features)
                found = torch.mul(lower, keys, out=rows.tokens("change", d)).baddbmm_(upper, across)
                rows.store("q", found, features)
            across.copy_(sums_change.mT)
            tensors = {"k": k, "v": v, "dk": dk, "dv": dv}
            rows = Rows(buffers, feature_map, k_spans, part, mask, None, tensors)
            for span in k_spans:
                rows.enter(*span)
                features, values = rows.features("k"), rows.values()
                found = torch.bmm(features, sums_change, out=rows.tokens("dv", e))
                rows.at("dv").copy_(rows.wide(found))
                found = rows.tokens("change", d)
                found.copy_(keys_change.expand_as(found)).baddbmm_(values, across)
                rows.store("k", found, features)
    return [dq, dk, dv, None]


# One operation for torch.compile, since tracing its inside gains nothing.
_attend = kernel(
    "whole",
    LinearOperands,
    _forward,
    _backward,
    shapes=lambda r, keeps: outputs(r.q, r.v),
    again=composed,
    inputs=4,
    kept=1,
    saves=2,
)
