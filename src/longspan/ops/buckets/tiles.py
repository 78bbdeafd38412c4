"""Softmax attention over sorted tokens: each tile of queries attends to a window of keys, one round at a time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_ops import operation
from . import native as kernels
from .definition import weighted
from .places import Rule, SortedLayout, count, first, inverse, pairs, reached
from .windows import Layout, Sorted, Visibility, laid_out, pieces, sort, tiled, unsort, windows

# Log of a weight of 0. It is finite, so that rows without keys are not NaN.
NEVER = -1e30


class Tiles(NamedTuple):
    """Operands of ``attend``."""

    q: Tensor  # (B,H,N,D)
    k: Tensor  # (B,H,P,M,D)
    v: Tensor  # (B,H,P,M,E)
    order: Tensor  # as in ``SortedLayout``, like the next two
    code: Tensor
    group: Tensor | None
    rule: Sequence[int]  # the fields of the ``Rule`` as numbers
    scale: float
    native: bool  # use the C++ kernels, for which ``native.why_not`` must have returned ""


def _forward(r: Tiles) -> tuple[Tensor, Tensor]:
    q, k, v, order, code, group, rule, scale, native = r
    places, rules = SortedLayout(order, code, group), _rule(rule)
    n, m, width = q.shape[2], k.shape[3], v.shape[-1]
    layout, wide = laid_out(rules, m), torch.promote_types(q.dtype, torch.float32)
    # The fused kernel needs equal numbers of channels in keys and values.
    most = max(q.shape[-1], width) if q.device.type == "cpu" and not native else 0
    rows = [F.pad(x, (0, max(0, most - x.shape[-1]))).reshape(-1, max(most, x.shape[-1])) for x in (q, k, v)]
    o, lse = q.new_empty(0), q.new_empty(0)
    for turn in range(order.shape[2]):
        found = sort(places, rules, turn, n, layout)
        visibility = Visibility(found, rules, layout, m, blocks=native)
        if native:
            reads, sums = kernels.read(rows, found, visibility, layout, scale)
            place = found.back + layout.back * layout.size
        else:
            reads, sums = _read(rows, found, visibility, layout, width, scale)
            place = found.back
        new, after = unsort(sums, place).clamp_(min=NEVER), unsort(reads, place).to(wide)
        if not turn:
            o, lse = after, new
            continue
        both = torch.logaddexp(lse, new)
        o.mul_((lse - both).exp_()[..., None]).addcmul_(after, (new - both).exp_()[..., None])
        lse = both
    blind = lse < NEVER / 2
    o, lse = o.masked_fill(blind[..., None], 0.0).to(v.dtype), lse.masked_fill(blind, -torch.inf)
    return o.view(*q.shape[:3], width), lse.view(q.shape[:3])


def _read(
    rows: Sequence[Tensor], found: Sorted, visibility: Visibility, layout: Layout, width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows of q, k, v -> output of each query slot (G,tiles size,E) and its log-sum-exp (G,tiles size)."""
    each = len(found.tokens)
    qs = rows[0].index_select(0, found.queries).unflatten(0, (each, -1))
    ks, vs = (x.index_select(0, found.keys).unflatten(0, (each, -1)) for x in rows[1:])
    wide = torch.promote_types(qs.dtype, torch.float32)
    reads, sums = qs.new_empty(each, qs.shape[1], width), qs.new_empty(each, qs.shape[1], dtype=wide)
    for piece in pieces(layout, each, qs.device.type):
        tile_q, keys, values = tiled(qs, layout, piece), windows(ks, layout, piece), windows(vs, layout, piece)
        # Arithmetic is several times faster here than ``masked_fill``.
        bias = visibility.visible(piece).to(wide).sub_(1).mul_(-NEVER)
        read, lsum = _attend(tile_q, keys, values, bias, scale)
        tiled(reads, layout, piece).copy_(read[..., :width])
        tiled(sums, layout, piece).copy_(lsum)
    return reads, sums


def _backward(r: Tiles, grad: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v; each tile is recomputed: p = exp(logit - lse), dS = p (dP - grad . o)."""
    q, k, v, order, code, group, rule, scale, _ = r
    places, rules = SortedLayout(order, code, group), _rule(rule)
    n, m, each = q.shape[2], k.shape[3], q.shape[0] * q.shape[1]
    layout, wide = laid_out(rules, m), torch.promote_types(q.dtype, torch.float32)
    rows = [x.reshape(-1, x.shape[-1]) for x in (q, grad, k, v)]
    delta = (grad.to(wide) * o.to(wide)).sum(-1).flatten()
    # For rows that see no key, exp(logit - inf) = 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).flatten()
    dq, dk, dv = (x.new_zeros(each, *x.shape[2:], dtype=wide) for x in (q, k, v))
    for turn in range(order.shape[2]):
        found = sort(places, rules, turn, n, layout)
        visibility = Visibility(found, rules, layout, m)
        qs, gs, ls, ds = (x.index_select(0, found.queries).unflatten(0, (each, -1)) for x in (*rows[:2], lse, delta))
        ks, vs = (x.index_select(0, found.keys).unflatten(0, (each, -1)) for x in rows[2:])
        fq = torch.empty(qs.shape, dtype=wide, device=q.device)
        fk, fv = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (ks, vs))
        for piece in pieces(layout, each, q.device.type):
            tile_q, tile_grad, sums, delta_ = (tiled(x, layout, piece) for x in (qs, gs, ls, ds))
            # Two products read each, and both would copy an overlapping view.
            keys, values = (windows(x, layout, piece).contiguous() for x in (ks, vs))
            p = (tile_q @ keys.mT).to(wide).mul_(scale).sub_(sums[..., None])
            # Visible pairs have p <= 1. Subnormal exponentials would cost a hundred times as much.
            p = p.clamp_(-80, 0).exp_().mul_(visibility.visible(piece))
            _overlap(fv, p.to(q.dtype).mT @ tile_grad, layout, piece)
            dl = (tile_grad @ values.mT).to(wide).sub_(delta_[..., None]).mul_(p).mul_(scale).to(q.dtype)
            tiled(fq, layout, piece).copy_(dl @ keys)
            _overlap(fk, dl.mT @ tile_q, layout, piece)
        dq += unsort(fq, found.back)
        begin, source = layout.back * layout.size, turn % code.shape[2]
        place = inverse(order[:, :, turn]).reshape(each, m)
        for total, part in ((dk, fk), (dv, fv)):
            _unwrap(part, rules, layout, m)
            total[:, source] += unsort(part, begin + place)
    return dq.view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)


def flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], order: Sequence[int], *rest: Any, **_: object) -> int:
    """FLOPs of the matrix products of ``longspan::buckets_forward`` over whole tiles, from the operands' shapes."""
    layout = laid_out(_rule(rest[2]), order[3])
    return 2 * (q[3] + v[4]) * order[0] * order[1] * order[2] * layout.tiles * layout.size * layout.wide


def _rule(numbers: Sequence[int]) -> Rule:
    return Rule(*(kind(x) for kind, x in zip(map(type, Rule()), numbers, strict=True)))


def _overlap(total: Tensor, grad: Tensor, layout: Layout, piece: slice) -> None:
    """Backward of ``windows``: add grad (G,t,wide,*) to total (G,slots,*)."""
    tiles = piece.stop - piece.start
    for s in range(layout.wide // layout.size):
        start = (piece.start + s) * layout.size
        part = grad[:, :, s * layout.size : (s + 1) * layout.size].flatten(1, 2)
        total[:, start : start + tiles * layout.size] += part


def _unwrap(x: Tensor, rule: Rule, layout: Layout, m: int) -> None:
    """Add the gradients of the wrapped slots before the first to those of the last chunks."""
    if rule.wrap:
        chunks, first = count(rule, m), layout.back * layout.size
        around, end = reached(rule, chunks) * rule.chunk, first + chunks * rule.chunk
        x[:, end - around : end] += x[:, first - around : first].clone()


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q (G,t,size,D), k, v (G,t,wide,D), bias (G,t,size,wide) -> output, log-sum-exp; undefined without keys."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
    logits = ((q @ k.mT).to(bias.dtype) * scale).add_(bias)
    return logits.softmax(-1).to(v.dtype) @ v, logits.logsumexp(-1)


def _shapes(r: Tiles) -> tuple[Tensor, Tensor]:
    sums = r.q.new_empty(r.q.shape[:3], dtype=torch.promote_types(r.q.dtype, torch.float32))
    return r.v.new_empty(*r.q.shape[:3], r.v.shape[-1]), sums


def _plain(r: Tiles) -> tuple[Tensor, Tensor]:
    """The same by operations with derivatives of any order; the log-sum-exps have none."""
    places, rule, n = SortedLayout(r.order, r.code, r.group), _rule(r.rule), r.q.shape[2]
    o, _, lse = weighted(r.q, r.k, r.v, first(pairs(places, rule, n), places, rule, n), r.scale)
    return o, lse.detach()


attend = operation("buckets", Tiles, _forward, shapes=_shapes, again=_plain, inputs=3, backward=_backward)
"""Attend within sorted tiles.

-> the output (B,H,N,E), and the log-sum-exp of each row (B,H,N) in float32 or float64, without a gradient. A query that
sees no key in any round gets 0 and -inf.
"""
