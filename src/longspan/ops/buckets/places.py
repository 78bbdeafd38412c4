"""Sorting of tokens by bucket in each round, and the pairs that are visible in that order."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Codes of places beyond the tokens and of masked tokens, which no query sees. Other codes are below LIMIT.
LIMIT = 2**27
PAD, ABSENT = -4 * LIMIT, -2 * LIMIT


class Rule(NamedTuple):
    """The keys that each query sees, given the buckets of each round; see ``ops.buckets.attend``."""

    causal: bool = True
    chunk: int = 0
    lookback: int = 1
    window: int = 0
    whole: bool = False
    cross: bool = False
    wrap: bool = False
    alone: bool = False


class SortedLayout(NamedTuple):
    """The sorted order of M tokens in each round, and codes that determine the visible pairs.

    The last N tokens are the queries. P is 1 if all rounds sort the same tokens, or R if each round has different ones.
    """

    order: Tensor  # (B,H,R,M) int64, the token in each place
    code: Tensor  # (B,H,P,R,M) int32: a query sees keys with its own code and the ``lookback`` codes below
    group: Tensor | None  # (B,H,P,R,M) int32: buckets, if codes do not contain them


def ranked(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Sort tokens by group (...,N), stably; return the order (...,N) and each token's rank in its group (...,N)."""
    found, order = groups.sort(dim=-1, stable=True)
    at = torch.arange(groups.shape[-1], device=groups.device).expand_as(order)
    border = F.pad(found[..., 1:] != found[..., :-1], (1, 0), value=True)
    start = torch.where(border, at, 0).cummax(-1).values
    return order, torch.empty_like(order).scatter(-1, order, at - start)


def inverse(order: Tensor) -> Tensor:
    """Return the place of each token in an order (...,M)."""
    at = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, at)


def find(groups: Tensor, buckets: int, rule: Rule, mask: Tensor | None = None) -> SortedLayout:
    """Sort whole sequences by groups (B,H,R,N) in 0 ... buckets - 1; tokens masked by mask (B,N) see nothing."""
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
    """Combine buckets and chunks, of any shape, into codes that keep different buckets out of sight of each other.

    There may be at most n / chunk chunks, plus two times ``lookback``.
    """
    if not rule.chunk:
        return groups
    stride = n // rule.chunk + 3 * rule.lookback + 3
    if (buckets + 1) * stride >= LIMIT:
        raise ValueError(f"{buckets} buckets of up to {stride} chunks are too many for int32 codes; use fewer buckets")
    return groups * stride + chunks


def near(rule: Rule, ci: Tensor, cj: Tensor, gi: Tensor | None, gj: Tensor | None, chunks: int) -> Tensor:
    """Return whether queries see keys in a round by their codes, before causality and windows.

    Args:
        rule: The keys that each query sees.
        ci: Codes of the queries.
        cj: Codes of the keys, broadcast with ``ci``.
        gi: Buckets of the queries, or None.
        gj: Buckets of the keys, or None.
        chunks: Number of chunks, for rules that wrap.
    """
    apart = ci - cj
    if rule.wrap:
        apart = torch.where((apart < 0) & (cj >= 0), apart + chunks, apart)
    seen = (apart >= 0) & (apart <= reached(rule, chunks))
    return seen if gi is None or gj is None else seen & (gi == gj)


def reached(rule: Rule, chunks: int) -> int:
    """Return how many chunks back a query sees; with ``wrap``, no chunk twice."""
    if not rule.chunk:
        return 0
    return min(rule.lookback, chunks - 1) if rule.wrap else rule.lookback


def count(rule: Rule, m: int) -> int:
    """Return the number of chunks of m sorted tokens."""
    return -(-m // rule.chunk) if rule.chunk else 1


def pairs(places: SortedLayout, rule: Rule, n: int) -> Tensor:
    """Return which keys the last n tokens see in each round, bool (B,H,R,N,M); with ``alone``, without their own."""
    order, code, _ = places
    rounds, m = order.shape[2:]
    at = torch.arange(m, device=order.device)
    seen = []
    for r in range(rounds):
        visible = _near(places, rule, n, r, r) & (code[:, :, r % code.shape[2], r] != ABSENT)[..., None, :]
        if not rule.whole:
            # Within a bucket, tokens are sorted by position, so places are in causal order.
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
    """Keep each pair of ``pairs`` only in the first round that shows it, (B,H,R,N,M)."""
    fresh = []
    for r in range(seen.shape[2]):
        new = seen[:, :, r]
        for before in range(r):
            new = new & ~_near(places, rule, n, r, before)
        fresh.append(new)
    return torch.stack(fresh, 2)


def _near(places: SortedLayout, rule: Rule, n: int, source: int, r: int) -> Tensor:
    """``near`` in round r for the last n of the tokens that round ``source`` sorts: (B,H,n,M)."""
    order, code, group = places
    m, source = order.shape[-1], source % code.shape[2]
    c, g = code[:, :, source, r], None if group is None else group[:, :, source, r]
    i, j = (..., slice(m - n, None), None), (..., None, slice(None))
    return near(rule, c[i], c[j], None if g is None else g[i], None if g is None else g[j], count(rule, m))
