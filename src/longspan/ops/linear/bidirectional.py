"""Bidirectional linear attention: two products on queries and keys before the feature map, span by span."""

from typing import Any

import torch
from torch import Tensor

from ..buffers import Buffers, fresh_like
from ..operands import double_backward
from ..segments import cut
from .composed import composed
from .features import divisors
from .workspace import BUDGET, Rows, groups, outputs

SHORT = 256  # tokens up to which plain operations are used, since they are fewer


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    eps: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalized linear attention where every query reads all keys, or all keys of its segment.

    Time is O((N + M) D E). Beyond inputs, output and gradients, memory is that of one span, except for packed
    sequences.

    Args:
        q: (B,H,N,D), before the feature map, of any strides.
        k: (B,H,M,D), before the feature map.
        v: (B,H,M,E), of the same dtype.
        feature_map: A name in ``features.MAPS``.
        eps: Added to the denominator.
        mask: (B,M) bool, as in ``causal.attend``.
        segments: (B,M) int64, as in ``causal.attend``; requires N = M.

    Returns:
        o (B,H,N,E) in v's dtype and the sums (B,H,D,E+1) over all keys.

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 4-6.
    """
    if segments is not None or max(q.shape[2], k.shape[2]) <= SHORT or k.shape[2] == 0 or q.shape[2] == 0:
        return composed(q, k, v, causal=False, feature_map=feature_map, eps=eps, mask=mask, segments=segments)
    return _Whole.apply(q, k, v, mask, feature_map, eps)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, feature_map: str, eps: float
    ) -> tuple[Tensor, Tensor]:
        # One operation for torch.compile, since tracing its inside gains nothing.
        run = _forward_op if torch.compiler.is_compiling() else _forward
        o, sums, below = run(q, k, v, mask, feature_map, eps)
        ctx.save_for_backward(q, k, v, mask, o, sums, below)
        ctx.options = feature_map, eps
        return o, sums

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        grad, grad_sums = upstream
        q, k, v, mask, o, sums, below = ctx.saved_tensors
        feature_map, eps = ctx.options
        if torch.is_grad_enabled():
            options: dict[str, Any] = {"feature_map": feature_map, "eps": eps, "mask": mask}
            grads = double_backward(composed, (q, k, v), (grad, grad_sums), causal=False, **options)
        else:
            run = _backward_op if torch.compiler.is_compiling() else _backward
            grads = run(grad, grad_sums, q, k, v, mask, o, sums, below, feature_map)
        return (*grads, None, None, None)


def _plan(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[list[slice], list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the groups of rows to process together, and the spans of queries and of keys; each is one chunk."""
    (batch, heads, n, d), m, e = q.shape, k.shape[2], v.shape[-1]
    if q.is_cuda:
        return [slice(0, batch)], [(0, 1, n)], [(0, 1, m)]
    tokens = max(BUDGET // (4 * heads * 2 * (d + e)), 1)
    return groups(batch, tokens // max(n, m)), cut(n, tokens, 1), cut(m, tokens, 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, feature_map: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the sums (B,H,D,E+1), denominators (B,H,N,1)."""
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
    grad: Tensor,
    grad_sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    o: Tensor,
    totals: Tensor,
    below: Tensor,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v from those of o and of the sums."""
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
    return dq, dk, dv


_forward_op = torch.library.custom_op("longspan::whole_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::whole_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, feature_map: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return outputs(q, v)


@_backward_op.register_fake
def _(
    grad: Tensor,
    grad_sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    o: Tensor,
    totals: Tensor,
    below: Tensor,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
