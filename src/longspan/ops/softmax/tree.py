"""Attention over a binary tree: a token reads its neighbors one by one, and distant tokens in larger spans."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import select_backend

LEVELS = 24  # of a state
EMPTY = -1e30  # log-weight of a span without tokens; finite, so that differences are not NaN
GATHERED = 2**22  # numbers of keys and values per copy


class Nodes(NamedTuple):
    """The last 2 k whole spans of each level, newest last; span m of level l holds tokens m 2^l ... (m+1) 2^l - 1.

    keys (B,H,L,2k,D) and values (B,H,L,2k,E) are means over the span, weights (B,H,L,2k) the logs of their divisors;
    position (B,) counts the tokens so far.
    """

    keys: Tensor
    values: Tensor
    weights: Tensor
    position: Tensor


def empty(batch: int, heads: int, k: int, dim: int, like: Tensor) -> Nodes:
    """Return a state without tokens for up to 2^24, with device and dtype (float32 at least) of ``like``."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    keys = torch.zeros(batch, heads, LEVELS, 2 * k, dim, dtype=dtype, device=like.device)
    weights = torch.full_like(keys[..., 0], EMPTY)
    return Nodes(keys, keys.clone(), weights, torch.zeros(batch, dtype=torch.long, device=like.device))


def depth(tokens: int, k: int) -> int:
    """Return a number of levels that covers all of ``tokens`` tokens."""
    level = 0
    while tokens + k > (2 * k - 1) << level:
        level += 1
    return level + 1


def cover(at: Tensor, total: Tensor, k: int, levels: int, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes that each token reads: level, index, and whether the node exists, each (B,N,1 + E).

    First comes the token itself, then level by level k nodes to the left, and k to the right unless ``causal``, next to
    the tokens that are already covered. If that is not a border of a span of the level, the first of the k is a node of
    the level below. Together the nodes cover every token to the left (and to the right) once. Spans at the right end
    hold the tokens that exist.

    Args:
        at: (B,N), positions.
        total: (B,), tokens of the sequence.
        k: Nodes per level and side.
        levels: The number of levels.
        causal: Reads no nodes to the right.

    Returns:
        Three tensors (B,N,1 + E).

    References:
        Ye et al. 2019 (1911.04070), section 3.2.
    """
    i, level = at[..., None, None], torch.arange(levels, device=at.device)[:, None]  # (B,N,1,1), (L,1)
    slots, before = torch.arange(k, device=at.device), (level - 1).clamp(min=0)
    # The levels below leave the tokens before 2^(l-1) left uncovered: with k nodes each, for any parity,
    # left <- ceil(left / 2) - k, which gives this. On the right, right <- floor(right / 2) + k.
    left = torch.where(level > 0, (-(-(i + k) >> before) - 2 * k).clamp(min=0), i)
    right = torch.where(level > 0, (i + 1 - k >> before) + 2 * k, i + 1)
    sides = []
    for border, outward in ((left, -1), (right, 1)):
        odd = torch.where(level > 0, border & 1, 0)
        below = (odd == 1) & (slots == 0)
        if outward < 0:
            near = torch.where(level > 0, border >> 1, border) - 1
            index = torch.where(below, border - 1, near - slots + odd)
            there = index >= 0
        else:
            near = torch.where(level > 0, border + odd >> 1, border)
            index = torch.where(below, border, near + slots - odd)
            there = index << (level - below.long()) < total[:, None, None, None]
        sides.append([part.expand_as(index).flatten(2) for part in (level - below.long(), index, there)])
    own = [torch.zeros_like(at)[..., None], at[..., None], torch.ones_like(at, dtype=torch.bool)[..., None]]
    level, index, there = (torch.cat(parts, -1) for parts in zip(own, *sides[: 1 if causal else 2], strict=True))
    return level, index, there


def kinds(k: int, levels: int, own: int, *, causal: bool) -> Tensor:
    """Return the kind of each edge of ``cover``, (1 + E,) int64: 0 for the token itself, else by side, level and place.

    All levels from ``own`` - 1 on share their kinds.
    """
    side = torch.arange(1 if causal else 2)[:, None, None] * own
    level = torch.arange(levels).clamp(max=own - 1)[:, None]
    return F.pad((1 + (side + level) * k + torch.arange(k)).flatten(), (1, 0))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    edges: Tensor,
    degree: int,
    lengths: Tensor,
    past: Nodes | None = None,
    *,
    causal: bool,
) -> tuple[Tensor, Nodes | None]:
    """Softmax attention of each token over the nodes of its ``cover`` with ``degree`` nodes per level and side.

    Key and value of a span are the means over its tokens with weights softmax(pool). An edge of kind e has the logit
    q.k / sqrt(D) + edges[..., e]; see ``kinds``. Time and memory are O(N degree log N).

    Args:
        q: (B,H,N,D), float32 at least, like the tensors below.
        k: (B,H,N,D).
        v: (B,H,N,E).
        pool: (B,H,N).
        edges: (B,H,N,kinds).
        degree: Nodes per level and side.
        lengths: (B,), the number of real tokens at the front of each row. Outputs of other tokens are arbitrary.
        past: The nodes of earlier tokens, for causal attention.
        causal: Reads no nodes to the right.

    Returns:
        (B,H,N,E), and with ``past`` the nodes after these tokens.

    Raises:
        ValueError: ``past`` and the new tokens together exceed 2^24 tokens.
    """
    batch, heads, n, dim = q.shape
    serves = select_backend("attention over a binary tree")
    if n == 0:
        return q.new_zeros(batch, heads, 0, v.shape[-1]) + 0 * v.sum(), past
    start = torch.zeros_like(lengths) if past is None else past.position
    tokens = torch.arange(n, device=q.device)
    at, total, levels = start[:, None] + tokens, start + lengths, _levels(n, degree, past)
    level, index, there = cover(at, total, degree, levels, causal=causal)
    own = (edges.shape[-1] - 1) // (degree if causal else 2 * degree)
    kind = kinds(degree, levels, own, causal=causal).to(q.device)
    bias = edges[..., kind].masked_fill(~there[:, None], -torch.inf)  # (B,H,N,1+E)
    pool = pool.masked_fill((tokens >= lengths[:, None])[:, None], EMPTY)
    if serves == "reference" and past is None:
        return _reference(q, k, v, pool, bias, level, index, there), None
    nodes, shift = _nodes(torch.cat([k, v, pool[..., None]], -1), start, levels, past)
    place = torch.where(there, index + shift.gather(1, level.flatten(1)).view_as(level), 0)
    outs, piece = [], max(1, GATHERED // (batch * heads * place.shape[-1] * nodes.shape[-1] + 1))
    for first in range(0, n, piece):
        part = slice(first, first + piece)
        read = _take(nodes, place[:, part])  # (B,H,piece,1+E,D+E+1)
        logits = (q[:, :, part, None] * read[..., :dim]).sum(-1) * dim**-0.5 + bias[:, :, part]
        outs.append((logits.softmax(-1)[..., None] * read[..., dim:-1]).sum(-2))
    if past is None:
        return torch.cat(outs, 2), None
    # The last whole spans of each level; higher levels have none yet.
    last = torch.arange(-2 * degree, 0, device=q.device)
    newest = (total[:, None] >> torch.arange(levels, device=q.device))[..., None] + last + shift[..., None]
    kept = torch.cat([_take(nodes, newest), _packed(past)[:, :, levels:]], 2)
    return torch.cat(outs, 2), Nodes(kept[..., :dim], kept[..., dim:-1], kept[..., -1], total)


def _levels(n: int, degree: int, past: Nodes | None) -> int:
    if past is None:
        return depth(n, degree)
    if torch.compiler.is_compiling():
        return LEVELS  # the number of earlier tokens is not known yet
    most = n + (int(past.position.max()) if len(past.position) else 0)
    if most > 1 << LEVELS:
        raise ValueError(f"the state has room for 2^{LEVELS} tokens, not {most}")
    return min(LEVELS, max(depth(most, degree), most.bit_length()))


def _packed(past: Nodes) -> Tensor:
    return torch.cat([past.keys, past.values, past.weights[..., None]], -1)


def _take(x: Tensor, place: Tensor) -> Tensor:
    """Gather x (B,H,T,C) at place (B,N,E) -> (B,H,N,E,C)."""
    picked = place.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, picked).unflatten(2, place.shape[1:])


def _nodes(leaves: Tensor, start: Tensor, levels: int, past: Nodes | None) -> tuple[Tensor, Tensor]:
    """Return the spans of all levels, of ``past`` and of the new tokens: keys, values and log-weights.

    leaves (B,H,N,D+E+1), start (B,) -> (B,H,T,D+E+1), and the offsets (B,L) from a span's index to its place.
    """
    n, table, old = leaves.shape[2], leaves, None if past is None else _packed(past)
    back = 0 if old is None else old.shape[3]
    tables, shifts, end = [], [], torch.zeros_like(start)
    for level in range(levels):
        if level:
            # At most this many whole spans end in the new tokens, or contain them if they are the first.
            first = (start >> level)[:, None] + torch.arange((n >> level) + 1, device=leaves.device)
            children = 2 * first + (back - (start >> level - 1))[:, None]
            table = _joined(tables[-1], torch.stack([children, children + 1], -1))
        if old is not None:
            table = torch.cat([old[:, :, level], table], 2)
        tables.append(table)
        shifts.append(end + back - (start >> level))
        end = end + table.shape[2]
    return torch.cat(tables, 2), torch.stack(shifts, 1)


def _joined(table: Tensor, pairs: Tensor) -> Tensor:
    """Merge pairs of spans: table (B,H,T,C), pairs (B,M,2) -> (B,H,M,C); spans beyond the table are empty."""
    last = table.shape[2] - 1
    both = _take(table, pairs.clamp(max=last))  # (B,H,M,2,C)
    weights = both[..., -1].masked_fill((pairs > last)[:, None], EMPTY)
    mean = (weights.softmax(-1)[..., None] * both[..., :-1]).sum(-2)
    return torch.cat([mean, weights.logsumexp(-1, keepdim=True)], -1)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, pool: Tensor, bias: Tensor, level: Tensor, index: Tensor, there: Tensor
) -> Tensor:
    """The definition, node by node and token by token: each span from its tokens."""
    rows = []
    for b, i in [(b, i) for b in range(q.shape[0]) for i in range(q.shape[2])]:
        keys, values = [], []
        for span in there[b, i].nonzero()[:, 0].tolist():
            size, m = 1 << int(level[b, i, span]), int(index[b, i, span])
            tokens = slice(m * size, (m + 1) * size)
            share = pool[b, :, tokens].softmax(-1)[:, None]  # (H,1,size)
            keys.append(share @ k[b, :, tokens])
            values.append(share @ v[b, :, tokens])
        logits = (torch.cat(keys, 1) @ q[b, :, i, :, None])[..., 0] * q.shape[-1] ** -0.5 + bias[b, :, i][
            :, there[b, i]
        ]
        rows.append((logits.softmax(-1)[:, None] @ torch.cat(values, 1))[:, 0])
    return torch.stack(rows).unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)
