"""Softmax attention of clusters of queries: by their means alone, or exact on the keys that a mean weighs most.

``groups`` (B,H,N) int64 are the clusters of the queries, as in ``clusters``; C of them, and C stands for none.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import select_backend
from ..rows import ragged
from ..softmax import dense
from ..tensors import upcast_half, visible
from . import clusters as pack

TILE = 64  # queries of one cluster that meet its keys together


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    clusters: int,
    *,
    topk: int = 0,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    r"""Every query reads what the mean of its cluster reads: q (B,H,N,D), k (B,H,M,D), v (B,H,M,E) -> (B,H,N,E).

    $p_c$ is the softmax of the products of cluster c's mean with the keys, over sqrt(D). With ``topk`` the weights of
    so many keys, the largest of $p_c$, are divided among them anew, by the query itself; those of the others stay.
    ``mask`` (B,M) bool: the keys that exist; where none do, and for a query without a cluster, the output is 0.
    ``dropout`` is the probability of dropping a weight.

    O((N + M) C D + N topk D) time, O(C M + N (D + topk)) memory; without ``topk`` O(C + N + M) times D.

    Source: Vyas et al. 2020 (2007.04825), sections 3.2 and 3.3.
    """
    if not (q.numel() and k.numel()):
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    if select_backend("attention of clusters") == "reference":
        p, _ = matrix(q, k, groups, clusters, topk=topk, mask=mask)
        return F.dropout(p, dropout).to(v.dtype) @ v
    means = pack.mean(q, groups, clusters)
    if not topk:
        seen = None if mask is None else mask[:, None, None, :]
        return pack.spread(dense.attend(means, k, v, mask=seen, dropout=dropout), groups)
    p, top = weigh(means, k, topk, mask)
    mass = p.gather(-1, top).sum(-1, keepdim=True).to(v.dtype)  # (B,H,C,1)
    rest = F.dropout(p.scatter(-1, top, 0.0), dropout).to(v.dtype) @ v
    exact = among(q, k, v, groups, top, mask=mask, dropout=dropout)
    return pack.spread(mass, groups) * exact + pack.spread(rest, groups)


def weigh(means: Tensor, k: Tensor, topk: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the means weigh, (B,H,C,M) in float32 at least, and the keys that each weighs most, (B,H,C,topk)."""
    logits = upcast_half(means @ k.mT) * k.shape[-1] ** -0.5
    hidden = None if mask is None else ~mask[:, None, None, :]
    if hidden is not None:
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    # By the logits: of two weights that are both rounded to zero, that of a key that does not exist could come first.
    top = logits.detach().topk(min(topk, k.shape[2]), -1).indices
    p = logits.softmax(-1)
    return p if hidden is None else p.masked_fill(hidden, 0.0), top


def among(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    top: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of each query over some keys of its cluster: top (B,H,C,T), keys by number -> (B,H,N,E).

    ``mask`` (B,M) bool: the keys that exist; ``causal``: key j <= query i. 0 where none are left and for a query
    without a cluster. The keys are gathered for each tile of queries of one cluster, not for each query.
    """
    n, clusters = q.shape[2], top.shape[2]
    slot, owner = tiles(groups, clusters)
    picked = top.gather(2, owner[..., None].expand(*owner.shape, top.shape[-1]))  # (B,H,tiles,T)
    seen = None
    if mask is not None:
        seen = gathered(mask[:, None, :, None].expand(-1, q.shape[1], -1, -1), picked).mT
    if causal:
        numbers = torch.arange(n, device=q.device)[:, None].expand(*slot.shape, 1)
        past = picked[..., None, :] <= into(numbers, slot, owner)  # (B,H,tiles,TILE,T)
        seen = past if seen is None else past & seen
    rows = [x.flatten(1, 2) for x in (into(q, slot, owner), gathered(k, picked), gathered(v, picked))]
    out = dense.attend(*rows, mask=None if seen is None else seen.flatten(1, 2), dropout=dropout)
    return out_of(out.unflatten(1, (q.shape[1], -1)), slot).masked_fill((groups == clusters)[..., None], 0.0)


def into(x: Tensor, slot: Tensor, owner: Tensor) -> Tensor:
    """Members into tiles: x (B,H,N,D) -> (B,H,tiles,TILE,D), 0 where a tile has none."""
    room = x.new_zeros(*x.shape[:2], owner.shape[-1] * TILE, x.shape[-1])
    return room.scatter(2, slot[..., None].expand_as(x), x).unflatten(2, (-1, TILE))


def out_of(y: Tensor, slot: Tensor) -> Tensor:
    """And back: y (B,H,tiles,TILE,E) -> (B,H,N,E)."""
    return y.flatten(2, 3).gather(2, slot[..., None].expand(*slot.shape, y.shape[-1]))


def gathered(x: Tensor, picked: Tensor) -> Tensor:
    """Keys or values by number: x (B,H,M,D), picked (B,H,tiles,T) -> (B,H,tiles,T,D)."""
    at = picked.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, at).unflatten(2, picked.shape[2:])


def tiles(groups: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Places in tiles that hold members of one cluster each: groups (B,H,N) -> slots (B,H,N), clusters (B,H,tiles).

    As many tiles as the worst division of N queries needs, so that no size depends on data.
    """
    n = groups.shape[-1]
    counts = pack.count(groups, clusters + 1)  # with those that have no cluster
    ends = ((counts + TILE - 1) // TILE).cumsum(-1)
    order = groups.argsort(dim=-1, stable=True)
    own = groups.gather(-1, order)
    within = torch.arange(n, device=groups.device) - (counts.cumsum(-1) - counts).gather(-1, own)
    first = (ends - (counts + TILE - 1) // TILE) * TILE
    slot = torch.empty_like(groups).scatter(-1, order, first.gather(-1, own) + within)
    number = torch.arange(n // TILE + clusters + 1, device=groups.device).expand(*groups.shape[:2], -1)
    return slot, torch.searchsorted(ends, number.contiguous(), right=True).clamp(max=clusters - 1)


def matrix(
    q: Tensor, k: Tensor, groups: Tensor, clusters: int, *, topk: int = 0, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition of ``attend``: the attention matrix (B,H,N,M), and which keys are weighed anew, bool. O(N M)."""
    member = F.one_hot(groups, clusters + 1)[..., :-1].to(q.dtype)  # (B,H,N,C)
    means = (member.mT @ q) / member.sum(2).clamp(min=1)[..., None]
    shown = (k.new_ones(len(k), k.shape[2], dtype=torch.bool) if mask is None else mask)[:, None, None, :]
    p, _ = dense.weights(means, k, mask=shown)
    p, chosen_ = member @ p, torch.zeros_like(member @ p, dtype=torch.bool)
    if topk:
        top = (means @ k.mT).masked_fill(~shown, -torch.inf).topk(min(topk, k.shape[2]), -1).indices
        picked = torch.zeros_like(means @ k.mT).scatter(-1, top, 1.0) * shown
        chosen_ = (member @ picked) > 0
        anew, _ = dense.weights(q, k, mask=chosen_)
        p = torch.where(chosen_, (p * chosen_).sum(-1, keepdim=True) * anew, p)
    return p, chosen_


class Reader(NamedTuple):
    """``attend`` after the queries' division into clusters, for padded and packed rows; sizes as in ``clusters``."""

    planes: Tensor  # (bits,D+1)
    clusters: int
    iterations: int
    topk: int = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, segments: Tensor | None) -> Tensor:
        """q, k (B,H,N,D), v (B,H,N,E) -> (B,H,N,E).

        ``mask`` (B,N) bool: the tokens that exist. ``segments`` (B,N) int64: packed sequences, whose tokens are divided
        and read on their own.
        """

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            groups = pack.assign(q, self.planes, self.clusters, self.iterations, mask=mask)
            return attend(q, k, v, groups, self.clusters, topk=self.topk, mask=mask)

        if segments is None:
            return run(q, k, v, mask)
        return ragged(q, k, v, run, mask, segments, exact=True)

    def told(self, q: Tensor, k: Tensor, *, mask: Tensor | None, segments: Tensor | None) -> dict[str, Tensor]:
        """``matrix`` (B,H,N,N) and ``mask``, ``groups`` (B,H,N), and ``chosen`` (B,H,N,N) with ``topk``. O(N^2)."""
        batch, heads, n, _ = q.shape

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            groups = pack.assign(q, self.planes, self.clusters, self.iterations, mask=mask)
            p, anew = matrix(q, k, groups, self.clusters, topk=self.topk, mask=mask)
            return torch.cat([p @ v[..., :n], anew.to(v.dtype) @ v[..., n:-1], groups[..., None].to(v.dtype)], -1)

        # Of values that are one for a single key each, the output is the matrix, by the row's own keys.
        q, k = upcast_half(q), upcast_half(k)
        eye = torch.eye(n, dtype=q.dtype, device=q.device)
        ones = torch.cat([eye, eye, torch.zeros_like(eye[:, :1])], -1).expand(batch, heads, -1, -1)
        found = run(q, k, ones, mask) if segments is None else ragged(q, k, ones, run, mask, segments, exact=True)
        p, anew, groups = found.split([n, n, 1], -1)
        groups = groups[..., 0].long()
        if mask is not None:
            groups = groups.masked_fill(~mask[:, None], self.clusters)
        allowed = visible(q.transpose(1, 2), causal=False, mask=mask, segments=segments)
        return {"matrix": p, "mask": allowed, "groups": groups} | ({"chosen": anew > 0} if self.topk else {})


def check(clusters: int, bits: int, iterations: int) -> None:
    """Raise ValueError for sizes that cannot be."""
    if clusters < 1 or iterations < 1:
        raise ValueError(f"clusters={clusters} and iterations={iterations} are counts; both must be at least 1")
    if not 1 <= bits <= pack.BITS:
        raise ValueError(f"bits={bits} of a hash must be from 1 to {pack.BITS}, so many as one whole number holds")
