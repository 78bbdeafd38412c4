"""Where tokens lie once each round has sorted them by bucket, and which pairs see each other by those places."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Codes of what nobody sees: places beyond the tokens, and tokens that do not exist. Real codes lie below LIMIT.
LIMIT = 2**27
PAD, ABSENT = -4 * LIMIT, -2 * LIMIT


class Rule(NamedTuple):
    """Who sees whom, given each round's buckets; see ``ops.buckets.attend``."""

    causal: bool = True
    chunk: int = 0
    lookback: int = 1
    window: int = 0
    whole: bool = False
    cross: bool = False
    wrap: bool = False
    alone: bool = False


class SortedLayout(NamedTuple):
    """The sorted order of each round, and what tells tokens' places apart.

    M tokens, of which the last N ask; P is 1 where all rounds have the same tokens, or R where each has its own.
    """

    order: Tensor  # (B,H,R,M) int64, the token in each place
    code: Tensor  # (B,H,P,R,M) int32: of a token in a round; equal or up to ``lookback`` larger where it sees a key
    group: Tensor | None  # (B,H,P,R,M) int32: buckets, where codes do not tell them


def ranked(groups: Tensor) -> tuple[Tensor, Tensor]:
    """groups (...,N) -> the stable order of tokens by group (...,N), and each token's rank inside its own (...,N)."""
    found, order = groups.sort(dim=-1, stable=True)
    at = torch.arange(groups.shape[-1], device=groups.device).expand_as(order)
    border = F.pad(found[..., 1:] != found[..., :-1], (1, 0), value=True)
    start = torch.where(border, at, 0).cummax(-1).values
    return order, torch.empty_like(order).scatter(-1, order, at - start)


def inverse(order: Tensor) -> Tensor:
    """The place of each token, (...,M)."""
    at = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, at)


def find(groups: Tensor, buckets: int, rule: Rule, mask: Tensor | None = None) -> SortedLayout:
    """The places of whole sequences: groups (B,H,R,N) in 0 ... buckets - 1; masked tokens, mask (B,N), see nobody."""
    n = groups.shape[-1]
    if mask is not None:
        groups = groups.masked_fill(~mask[:, None, None], buckets)
    order, rank = ranked(groups)
    group = None
    if rule.whole:
        code = inverse(order) // rule.chunk
        group = None if rule.cross else groups[:, :, None].int()
    else:
        code = coded(groups, rank // rule.chunk if rule.chunk else rank * 0, buckets, rule, n)
    if mask is not None:
        code = code.masked_fill(~mask[:, None, None], ABSENT)
    return SortedLayout(order, code[:, :, None].int(), group)


def coded(groups: Tensor, chunks: Tensor, buckets: int, rule: Rule, n: int) -> Tensor:
    """One number for bucket and chunk; those of different buckets are too far apart to see each other. Any shape.

    Chunks are counted so that there are at most n / chunk of them, and two looks back.
    """
    if not rule.chunk:
        return groups
    stride = n // rule.chunk + 3 * rule.lookback + 3
    if (buckets + 1) * stride >= LIMIT:
        raise ValueError(f"{buckets} buckets of up to {stride} chunks are too many to be told apart; use fewer buckets")
    return groups * stride + chunks


def near(rule: Rule, ci: Tensor, cj: Tensor, gi: Tensor | None, gj: Tensor | None, chunks: int) -> Tensor:
    """Whether queries of codes ci look back as far as keys of codes cj, in a round: tensors that broadcast.

    ``chunks``: how many there are, where the first looks back at the last.
    """
    apart = ci - cj
    if rule.wrap:
        apart = torch.where((apart < 0) & (cj >= 0), apart + chunks, apart)
    seen = (apart >= 0) & (apart <= reached(rule, chunks))
    return seen if gi is None or gj is None else seen & (gi == gj)


def reached(rule: Rule, chunks: int) -> int:
    """How many chunks back a query sees; where chunks wrap around, none is seen twice."""
    if not rule.chunk:
        return 0
    return min(rule.lookback, chunks - 1) if rule.wrap else rule.lookback


def count(rule: Rule, m: int) -> int:
    """How many chunks m sorted tokens make."""
    return -(-m // rule.chunk) if rule.chunk else 1


def pairs(places: SortedLayout, rule: Rule, n: int) -> Tensor:
    """Which of the n last tokens see which in each round: (B,H,R,N,M), one's own key included unless ``alone``."""
    order, code, _ = places
    rounds, m = order.shape[2:]
    at = torch.arange(m, device=order.device)
    seen = []
    for r in range(rounds):
        visible = _near(places, rule, n, r, r) & (code[:, :, r % code.shape[2], r] != ABSENT)[..., None, :]
        if not rule.whole:
            # Sorted by position inside a bucket, so that places tell the order, and ranks.
            place = inverse(order[:, :, r])
            ahead = place[..., m - n :, None] - place[..., None, :]
        else:
            ahead = at[m - n :, None] - at
        if rule.causal:
            visible = visible & (ahead >= 0)
        if rule.window:
            visible = visible & (ahead < rule.window)
        if rule.alone:
            visible = visible & (at[m - n :, None] != at)
        seen.append(visible)
    return torch.stack(seen, 2)


def first(seen: Tensor, places: SortedLayout, rule: Rule, n: int) -> Tensor:
    """Of ``pairs``, those of the first round in which a pair sees each other: every pair counts once. (B,H,R,N,M)."""
    fresh = []
    for r in range(seen.shape[2]):
        new = seen[:, :, r]
        for before in range(r):
            new = new & ~_near(places, rule, n, r, before)
        fresh.append(new)
    return torch.stack(fresh, 2)


def _near(places: SortedLayout, rule: Rule, n: int, source: int, r: int) -> Tensor:
    """``near`` in round r of the n last tokens and all, of those that round ``source`` sorts: (B,H,n,M)."""
    order, code, group = places
    m, source = order.shape[-1], source % code.shape[2]
    c, g = code[:, :, source, r], None if group is None else group[:, :, source, r]
    i, j = (..., slice(m - n, None), None), (..., None, slice(None))
    return near(rule, c[i], c[j], None if g is None else g[i], None if g is None else g[j], count(rule, m))
