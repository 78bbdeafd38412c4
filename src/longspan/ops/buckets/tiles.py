"""Softmax over sorted places: each tile of queries meets a window of keys around it, round by round."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .places import PAD, Places, Rule, count, inverse, near, reached

LOGITS = {"cpu": 2**19, "cuda": 2**26}  # logits that are held at once
TILE = 64  # queries in a tile, unless chunks are larger
# Finite, so that a tile's row without keys is no NaN: its weight beside any other is 0.
NEVER = -1e30


class Layout(NamedTuple):
    """Slots of sorted tokens: ``back`` tiles before the first query, ``tiles`` of queries, ``ahead`` tiles behind."""

    size: int
    back: int
    tiles: int
    ahead: int

    @property
    def wide(self) -> int:
        """Keys that a tile of queries meets."""
        return self.size * (self.back + 1 + self.ahead)

    @property
    def slots(self) -> int:
        return self.size * (self.back + self.tiles + self.ahead)


def laid_out(rule: Rule, m: int) -> Layout:
    """The layout for m sorted tokens."""
    if rule.whole:
        size = rule.chunk * -(-min(TILE, m) // rule.chunk)
        reach, ahead = reached(rule, count(rule, m)) * rule.chunk, 0
    else:
        reach = min((rule.lookback + 1) * rule.chunk if rule.chunk else rule.window or m, m) - 1
        size = min(max(TILE, rule.chunk if rule.chunk < 2 * TILE else 0), m)
        ahead = 0 if rule.causal else -(-min(rule.chunk or m, m) // size)
    return Layout(size, -(-reach // size), -(-m // size), ahead)


class Sorted(NamedTuple):
    """One round's operands, slot by slot, and where they come from."""

    tokens: Tensor  # (G,slots) int64, the token in each slot
    codes: Tensor  # (r+1,G,slots), those of the earlier rounds and, last, of this one
    asks: Tensor  # (G,tiles size), codes of queries
    groups: Tensor | None  # (r+1,G,slots)
    back: Tensor  # (G,N) int64, the slot of each query, counted from the first query's
    keys: Tensor  # (G slots) int64, rows of k and v
    queries: Tensor  # (G tiles size) int64, rows of q


def sort(places: Places, rule: Rule, r: int, n: int, layout: Layout) -> Sorted:
    """The slots of round r, for the n last tokens as queries."""
    order, code, group = places
    batch, heads, _, m = order.shape
    sources, each, device = code.shape[2], batch * heads, order.device
    place = torch.arange(layout.slots, device=device) - layout.back * layout.size
    chunks, p = count(rule, m), r % code.shape[2]
    # Where chunks wrap, the slots before the first are those of the last chunks.
    around = (place < 0) & (place >= -reached(rule, chunks) * rule.chunk) & rule.wrap
    place = torch.where(around, place + chunks * rule.chunk, place)
    inside = (place >= 0) & (place < m)
    tokens = order[:, :, r].reshape(each, m)[:, place.clamp(0, m - 1)]

    def slots(x: Tensor, past: int) -> Tensor:
        x = x[:, :, p, : r + 1].reshape(each, r + 1, m).transpose(0, 1)
        return x.gather(-1, tokens.expand(r + 1, -1, -1)).masked_fill(~inside, past)

    codes = slots(code, PAD)
    codes[-1] -= (around & inside).int() * chunks
    own = torch.arange(each, device=device)[:, None]
    asks = slice(layout.size * layout.back, layout.size * (layout.back + layout.tiles))
    token = tokens[:, asks] - (m - n)
    # As queries, places beyond the tokens and tokens that do not exist see nothing, for -PAD and -ABSENT are too large
    # to be near. Nor do tokens of earlier calls.
    query = codes[-1, :, asks].abs().masked_fill(token < 0, -PAD)
    back = inverse(order[:, :, r]).reshape(each, m)[:, m - n :]
    keys, queries = ((own * sources + p) * m + tokens).flatten(), (own * n + token.clamp(min=0)).flatten()
    return Sorted(tokens, codes, query, None if group is None else slots(group, 0), back, keys, queries)


def unsort(x: Tensor, back: Tensor) -> Tensor:
    """Slots of queries (G,S,...) to the order of tokens, back (G,N) -> (G,N,...)."""
    rows = back + torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, back.shape)


def pieces(layout: Layout, each: int, kind: str) -> Iterator[slice]:
    """Tiles that are worked off at once."""
    step = max(1, LOGITS.get(kind, LOGITS["cpu"]) // (each * layout.size * layout.wide))
    return (slice(i, min(i + step, layout.tiles)) for i in range(0, layout.tiles, step))


def windows(x: Tensor, layout: Layout, piece: slice) -> Tensor:
    """The keys that each tile of a piece meets: (...,G,slots,*) -> (...,G,t,wide,*), overlapping in place."""
    x = x[:, piece.start * layout.size : (piece.stop - 1) * layout.size + layout.wide]
    return x.unfold(1, layout.wide, layout.size).movedim(-1, 2)


def tiled(x: Tensor, layout: Layout, piece: slice) -> Tensor:
    """Queries' slots (G,tiles size,*) -> (G,t,size,*)."""
    return x.unflatten(1, (layout.tiles, layout.size))[:, piece]


class Ask:
    """Which pairs of a tile see each other and have not in an earlier round."""

    def __init__(self, found: Sorted, rule: Rule, layout: Layout, m: int):
        self.found, self.rule, self.layout, self.chunks = found, rule, layout, count(rule, m)
        size, device = layout.size, found.tokens.device
        self.query = slice(layout.back * size, (layout.back + layout.tiles) * size)
        ahead = layout.back * size + torch.arange(size, device=device)[:, None] - torch.arange(
            layout.wide, device=device
        )  # fmt: skip
        # Places inside a bucket are in the order of positions.
        self.band = ahead == ahead
        if rule.causal and not rule.whole:
            self.band &= ahead >= 0
        if rule.window:
            self.band &= ahead < rule.window
        if rule.alone:
            self.band &= ahead != 0

    def both(self, x: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        """x (G,slots) as queries (G,t,size,1) and as keys (G,t,1,wide)."""
        asks = tiled(x[:, self.query], self.layout, piece)[..., None]
        return asks, windows(x, self.layout, piece)[:, :, None]

    def visible(self, piece: slice) -> Tensor:
        """Whether it is so, bool (G,t,size,wide)."""
        found, rule = self.found, self.rule
        cj = windows(found.codes[-1], self.layout, piece)[:, :, None]
        ci = tiled(found.asks, self.layout, piece)[..., None]
        groups = (None, None) if found.groups is None else self.both(found.groups[-1], piece)
        if rule.causal and not rule.whole:
            # Codes never fall along sorted places, so that one comparison says it all.
            seen = (cj >= ci - reached(rule, self.chunks)) & self.band
        else:
            # The slots before the first have codes below zero, so that nothing wraps here.
            seen = near(rule._replace(wrap=False, lookback=reached(rule, self.chunks)), ci, cj, *groups, self.chunks)
            seen &= self.band
        if rule.causal and rule.whole:
            i, j = self.both(found.tokens, piece)
            seen &= j <= i
        for r in range(len(found.codes) - 1):
            ci, cj = self.both(found.codes[r], piece)
            if rule.whole:
                groups = (None, None) if found.groups is None else self.both(found.groups[r], piece)
                seen &= ~near(rule, ci, cj, *groups, self.chunks)
            elif rule.causal:
                # What comes before and in the same bucket has no larger code, so that the distance says it all.
                seen &= (ci - cj).abs_() > reached(rule, self.chunks)
            else:
                seen &= ~near(rule, ci, cj, None, None, self.chunks)
        return seen


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    code: Tensor,
    group: Tensor | None,
    rule: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q (B,H,N,D), k (B,H,P,M,D), v (B,H,P,M,E), places as in ``Places`` -> output (B,H,N,E), log-sums (B,H,N).

    Log-sums are float32 at least, and -inf where no round shows a key; the output is 0 there.
    """
    places, rules = Places(order, code, group), _rule(rule)
    n, m, width, each = q.shape[2], k.shape[3], v.shape[-1], q.shape[0] * q.shape[1]
    layout, wide = laid_out(rules, m), torch.promote_types(q.dtype, torch.float32)
    # The fused kernel wants as many channels of values as of keys.
    most = max(q.shape[-1], width) if q.device.type == "cpu" else 0
    rows = [F.pad(x, (0, max(0, most - x.shape[-1]))).reshape(-1, max(most, x.shape[-1])) for x in (q, k, v)]
    o, lse = q.new_zeros(each, n, width, dtype=wide), q.new_full((each, n), NEVER, dtype=wide)
    for r in range(order.shape[2]):
        found = sort(places, rules, r, n, layout)
        ask = Ask(found, rules, layout, m)
        qs = rows[0].index_select(0, found.queries).unflatten(0, (each, -1))
        ks, vs = (x.index_select(0, found.keys).unflatten(0, (each, -1)) for x in rows[1:])
        reads, sums = q.new_empty(each, qs.shape[1], width), q.new_empty(each, qs.shape[1], dtype=wide)
        for piece in pieces(layout, each, q.device.type):
            asks, keys, values = tiled(qs, layout, piece), windows(ks, layout, piece), windows(vs, layout, piece)
            # Sums are several times as fast here as what fills by a mask.
            bias = ask.visible(piece).to(wide).sub_(1).mul_(-NEVER)
            read, lsum = _attend(asks, keys, values, bias, scale)
            tiled(reads, layout, piece).copy_(read[..., :width])
            tiled(sums, layout, piece).copy_(lsum)
        new, after = unsort(sums, found.back), unsort(reads, found.back)
        both = torch.logaddexp(lse, new)
        o = o * (lse - both).exp()[..., None] + after * (new - both).exp()[..., None]
        lse = both
    blind = lse < NEVER / 2
    o, lse = o.masked_fill(blind[..., None], 0.0).to(v.dtype), lse.masked_fill(blind, -torch.inf)
    return o.view(*q.shape[:3], width), lse.view(q.shape[:3])


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, order: Tensor, code: Tensor,
    group: Tensor | None, rule: Sequence[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, each tile computed again: p = exp(logit - lse), dS = p (dP - grad . o)."""
    places, rules = Places(order, code, group), _rule(rule)
    n, m, each = q.shape[2], k.shape[3], q.shape[0] * q.shape[1]
    layout, wide = laid_out(rules, m), torch.promote_types(q.dtype, torch.float32)
    rows = [x.reshape(-1, x.shape[-1]) for x in (q, grad, k, v)]
    delta = (grad.to(wide) * o.to(wide)).sum(-1).flatten()
    # A row that sees nothing: exp(logit - inf) = 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).flatten()
    dq, dk, dv = (x.new_zeros(each, *x.shape[2:], dtype=wide) for x in (q, k, v))
    for r in range(order.shape[2]):
        found = sort(places, rules, r, n, layout)
        ask = Ask(found, rules, layout, m)
        qs, gs, ls, ds = (x.index_select(0, found.queries).unflatten(0, (each, -1)) for x in (*rows[:2], lse, delta))
        ks, vs = (x.index_select(0, found.keys).unflatten(0, (each, -1)) for x in rows[2:])
        fq = torch.empty(qs.shape, dtype=wide, device=q.device)
        fk, fv = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (ks, vs))
        for piece in pieces(layout, each, q.device.type):
            asks, ups, sums, delta_ = (tiled(x, layout, piece) for x in (qs, gs, ls, ds))
            # Two products read each; both would copy what overlaps.
            keys, values = (windows(x, layout, piece).contiguous() for x in (ks, vs))
            p = (asks @ keys.mT).to(wide).mul_(scale).sub_(sums[..., None])
            # Where a pair is seen, p <= 1; numbers whose exponentials are not normal cost a hundred times as much.
            p = p.clamp_(-80, 0).exp_().mul_(ask.visible(piece))
            _overlap(fv, p.to(q.dtype).mT @ ups, layout, piece)
            dl = (ups @ values.mT).to(wide).sub_(delta_[..., None]).mul_(p).mul_(scale).to(q.dtype)
            tiled(fq, layout, piece).copy_(dl @ keys)
            _overlap(fk, dl.mT @ asks, layout, piece)
        dq += unsort(fq, found.back)
        begin, source = layout.back * layout.size, r % code.shape[2]
        place = inverse(order[:, :, r]).reshape(each, m)
        for total, part in ((dk, fk), (dv, fv)):
            _unwrap(part, rules, layout, m)
            total[:, source] += unsort(part, begin + place)
    return dq.view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)


def flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], order: Sequence[int], *rest: Any, **_: object) -> int:
    """FLOPs of the products of ``longspan::buckets_forward``, by the shapes of its operands: of whole tiles."""
    layout = laid_out(_rule(rest[2]), order[3])
    return 2 * (q[3] + v[4]) * order[0] * order[1] * order[2] * layout.tiles * layout.size * layout.wide


def _rule(numbers: Sequence[int]) -> Rule:
    return Rule(*(kind(x) for kind, x in zip(map(type, Rule()), numbers, strict=True)))


def _overlap(total: Tensor, grad: Tensor, layout: Layout, piece: slice) -> None:
    """The adjoint of ``windows``, added to total (G,slots,*): grad (G,t,wide,*)."""
    tiles = piece.stop - piece.start
    for s in range(layout.wide // layout.size):
        start = (piece.start + s) * layout.size
        part = grad[:, :, s * layout.size : (s + 1) * layout.size].flatten(1, 2)
        total[:, start : start + tiles * layout.size] += part


def _unwrap(x: Tensor, rule: Rule, layout: Layout, m: int) -> None:
    """Slots before the first that hold the last chunks again: their gradients go where these are."""
    if rule.wrap:
        chunks, first = count(rule, m), layout.back * layout.size
        around, end = reached(rule, chunks) * rule.chunk, first + chunks * rule.chunk
        x[:, end - around : end] += x[:, first - around : first].clone()


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q (G,t,size,D), k, v (G,t,wide,D), bias (G,t,size,wide) -> output, log-sums; any output where none is seen."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
    logits = ((q @ k.mT).to(bias.dtype) * scale).add_(bias)
    return logits.softmax(-1).to(v.dtype) @ v, logits.logsumexp(-1)


forward_op = torch.library.custom_op("longspan::buckets_forward", forward, mutates_args=())
backward_op = torch.library.custom_op("longspan::buckets_backward", backward, mutates_args=())


@forward_op.register_fake
def _(q, k, v, order, code, group, rule, scale):
    sums = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return v.new_empty(*q.shape[:3], v.shape[-1]), sums


@backward_op.register_fake
def _(grad, q, k, v, o, lse, order, code, group, rule, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    q, k, v, order, code, group, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, order, code, group)


def _differentiate(ctx, grad, _):
    q, k, v, o, lse, order, code, group = ctx.saved_tensors
    found = backward_op(grad, q, k, v, o, lse, order, code, group, *ctx.options)
    return *found, None, None, None, None, None


forward_op.register_autograd(_differentiate, setup_context=_save)
