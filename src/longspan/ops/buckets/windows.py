"""Slots of sorted tokens: tiles of queries, their windows of keys, and the visible pairs."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .places import PAD, Rule, SortedLayout, count, inverse, near, reached

LOGITS = {"cpu": 2**19, "cuda": 2**26}  # logits in memory at a time
TILE = 64  # queries in a tile, unless chunks are larger


class Layout(NamedTuple):
    """Slots of sorted tokens: ``back`` tiles before the queries, ``tiles`` of queries, ``ahead`` tiles after them."""

    size: int
    back: int
    tiles: int
    ahead: int

    @property
    def wide(self) -> int:
        """Keys in the window of a tile of queries."""
        return self.size * (self.back + 1 + self.ahead)

    @property
    def slots(self) -> int:
        return self.size * (self.back + self.tiles + self.ahead)


def laid_out(rule: Rule, m: int) -> Layout:
    """Return the layout of m sorted tokens."""
    if rule.whole:
        size = rule.chunk * -(-min(TILE, m) // rule.chunk)
        reach, ahead = reached(rule, count(rule, m)) * rule.chunk, 0
    else:
        reach = min((rule.lookback + 1) * rule.chunk if rule.chunk else rule.window or m, m) - 1
        size = min(max(TILE, rule.chunk if rule.chunk < 2 * TILE else 0), m)
        ahead = 0 if rule.causal else -(-min(rule.chunk or m, m) // size)
    return Layout(size, -(-reach // size), -(-m // size), ahead)


class Sorted(NamedTuple):
    """The operands of one round by slot, and their sources."""

    tokens: Tensor  # (G,slots) int64, the token in each slot
    codes: Tensor  # (r+1,G,slots), of the earlier rounds and, last, of this one
    query_codes: Tensor  # (G,tiles size), codes of queries
    groups: Tensor | None  # (r+1,G,slots)
    back: Tensor  # (G,N) int64, the slot of each query, counted from the first query's
    keys: Tensor  # (G slots) int64, rows of k and v
    queries: Tensor  # (G tiles size) int64, rows of q


def sort(places: SortedLayout, rule: Rule, r: int, n: int, layout: Layout) -> Sorted:
    """Return the slots of round r; the last n tokens are the queries."""
    order, code, group = places
    batch, heads, _, m = order.shape
    sources, each, device = code.shape[2], batch * heads, order.device
    place = torch.arange(layout.slots, device=device) - layout.back * layout.size
    chunks, p = count(rule, m), r % code.shape[2]
    # If chunks wrap, the slots before the first hold the last chunks.
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
    query_slots = slice(layout.size * layout.back, layout.size * (layout.back + layout.tiles))
    token = tokens[:, query_slots] - (m - n)
    # As queries, padding and masked tokens see nothing, because -PAD and -ABSENT are too large to be near. Tokens of
    # earlier calls are not queries either.
    query = codes[-1, :, query_slots].abs().masked_fill(token < 0, -PAD)
    back = inverse(order[:, :, r]).reshape(each, m)[:, m - n :]
    keys, queries = ((own * sources + p) * m + tokens).flatten(), (own * n + token.clamp(min=0)).flatten()
    return Sorted(tokens, codes, query, None if group is None else slots(group, 0), back, keys, queries)


def unsort(x: Tensor, back: Tensor) -> Tensor:
    """Gather slots of queries (G,S,...) in the order of tokens, back (G,N) -> (G,N,...)."""
    rows = back + torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, back.shape)


def pieces(layout: Layout, each: int, kind: str) -> Iterator[slice]:
    """Yield the tiles of each step, bounded by ``LOGITS``."""
    step = max(1, LOGITS.get(kind, LOGITS["cpu"]) // (each * layout.size * layout.wide))
    return (slice(i, min(i + step, layout.tiles)) for i in range(0, layout.tiles, step))


def windows(x: Tensor, layout: Layout, piece: slice) -> Tensor:
    """Return the window of keys of each tile: (...,G,slots,*) -> (...,G,t,wide,*), an overlapping view."""
    x = x[:, piece.start * layout.size : (piece.stop - 1) * layout.size + layout.wide]
    return x.unfold(1, layout.wide, layout.size).movedim(-1, 2)


def tiled(x: Tensor, layout: Layout, piece: slice) -> Tensor:
    """Split slots of queries (G,tiles size,*) into tiles (G,t,size,*)."""
    return x.unflatten(1, (layout.tiles, layout.size))[:, piece]


class Visibility:
    """The visible pairs of each tile that no earlier round has shown."""

    def __init__(self, found: Sorted, rule: Rule, layout: Layout, m: int, blocks: bool = False):
        self.found, self.rule, self.layout, self.chunks = found, rule, layout, count(rule, m)
        self.blocks = blocks
        size, device = layout.size, found.tokens.device
        self.query = slice(layout.back * size, (layout.back + layout.tiles) * size)
        ahead = (
            layout.back * size + torch.arange(size, device=device)[:, None] - torch.arange(layout.wide, device=device)
        )
        # Within a bucket, slots are in the order of positions.
        self.band = ahead == ahead
        if rule.causal and not rule.whole:
            self.band &= ahead >= 0
        if rule.window:
            self.band &= ahead < rule.window
        if rule.alone:
            self.band &= ahead != 0
        if blocks:
            self.band = self.band.unflatten(1, (-1, size)).transpose(0, 1).contiguous()

    def as_queries(self, x: Tensor, piece: slice) -> Tensor:
        """View x (G,tiles size) as queries (G,t,size,1)."""
        x = tiled(x, self.layout, piece)[..., None]
        return x[:, :, None] if self.blocks else x

    def as_keys(self, x: Tensor, piece: slice) -> Tensor:
        """View x (G,slots) as keys (G,t,1,wide)."""
        x = windows(x, self.layout, piece)
        return x.unflatten(2, (-1, self.layout.size))[:, :, :, None] if self.blocks else x[:, :, None]

    def both(self, x: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        """View x (G,slots) as queries and as keys."""
        return self.as_queries(x[:, self.query], piece), self.as_keys(x, piece)

    def visible(self, piece: slice) -> Tensor:
        """Return the visible pairs, bool (G,t,size,wide); with ``blocks``, (G,t,wide / size,size,size)."""
        found, rule = self.found, self.rule
        cj, ci = self.as_keys(found.codes[-1], piece), self.as_queries(found.query_codes, piece)
        groups = (None, None) if found.groups is None else self.both(found.groups[-1], piece)
        if rule.causal and not rule.whole:
            # Codes never decrease along the slots, so one comparison is enough.
            seen = (cj >= ci - reached(rule, self.chunks)) & self.band
        else:
            # The slots before the first have negative codes, so nothing wraps here.
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
                # Earlier tokens of the bucket have no larger code, so the distance is enough.
                seen &= (ci - cj).abs_() > reached(rule, self.chunks)
            else:
                seen &= ~near(rule, ci, cj, None, None, self.chunks)
        return seen
