"""Clustered attention: softmax attention of the means of clusters of queries, optionally exact on their top keys.

``groups`` (B,H,N) int64 holds the cluster of each query, one of C, as in ``clusters``; C means that it has none.
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

TILE = 64  # queries of one cluster that share gathered keys


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
    r"""Give every query the attention output of the mean of its cluster.

    $p_c$ is the softmax of the products of cluster c's mean with the keys, divided by $\sqrt D$. With ``topk``, each
    query redistributes the total weight of the ``topk`` largest entries of $p_c$ among these keys, by its own scores.
    The other weights stay.

    Takes O((N + M) C D + N topk D) time and O(C M + N (D + topk)) memory; without ``topk``, O((C + N + M) D) memory.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,M,D) keys.
        v: (B,H,M,E) values.
        groups: (B,H,N) int64, the cluster of each query, C for none.
        clusters: Number of clusters, C.
        topk: Number of keys that each query weighs by its own scores.
        mask: (B,M) bool, True on real keys; None: all are.
        dropout: Probability of dropping a weight.

    Returns:
        The output (B,H,N,E), 0 without keys and for a query without a cluster.

    References:
        Vyas et al. 2020 (2007.04825), sections 3.2 and 3.3.
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
    """Return the attention weights of the means (B,H,C,M), in float32 or float64, and their top keys (B,H,C,topk)."""
    logits = upcast_half(means @ k.mT) * k.shape[-1] ** -0.5
    hidden = None if mask is None else ~mask[:, None, None, :]
    if hidden is not None:
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    # Select by logits: among weights that underflow to 0, a masked key could come first.
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
    """Attend from each query to the given keys of its cluster.

    Keys are gathered once for each tile of queries of one cluster, not for each query.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,M,D) keys.
        v: (B,H,M,E) values.
        groups: (B,H,N) int64, the cluster of each query, C for none.
        top: (B,H,C,T) int64, indices of the keys of each cluster.
        mask: (B,M) bool, True on real keys; None: all are.
        causal: Query i sees only keys j <= i.
        dropout: Probability of dropping a weight.

    Returns:
        The output (B,H,N,E), 0 for a query that sees no key or has no cluster.
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
    """Scatter members to tiles: x (B,H,N,D) -> (B,H,tiles,TILE,D), 0 in empty slots."""
    room = x.new_zeros(*x.shape[:2], owner.shape[-1] * TILE, x.shape[-1])
    return room.scatter(2, slot[..., None].expand_as(x), x).unflatten(2, (-1, TILE))


def out_of(y: Tensor, slot: Tensor) -> Tensor:
    """Gather members from tiles: y (B,H,tiles,TILE,E) -> (B,H,N,E)."""
    return y.flatten(2, 3).gather(2, slot[..., None].expand(*slot.shape, y.shape[-1]))


def gathered(x: Tensor, picked: Tensor) -> Tensor:
    """Gather keys or values by index: x (B,H,M,D), picked (B,H,tiles,T) -> (B,H,tiles,T,D)."""
    at = picked.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, at).unflatten(2, picked.shape[2:])


def tiles(groups: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Assign members to tiles of one cluster each: groups (B,H,N) -> slots (B,H,N), clusters (B,H,tiles).

    The number of tiles is that of the worst case for N queries, so no size depends on the data.
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
    """Compute the matrix (B,H,N,M) of ``attend`` by its definition, and the mask of top keys, bool; O(N M) memory."""
    member = F.one_hot(groups, clusters + 1)[..., :-1].to(q.dtype)  # (B,H,N,C)
    means = (member.mT @ q) / member.sum(2).clamp(min=1)[..., None]
    shown = (k.new_ones(len(k), k.shape[2], dtype=torch.bool) if mask is None else mask)[:, None, None, :]
    p, _ = dense.weights(means, k, mask=shown)
    p, chosen = member @ p, torch.zeros_like(member @ p, dtype=torch.bool)
    if topk:
        top = (means @ k.mT).masked_fill(~shown, -torch.inf).topk(min(topk, k.shape[2]), -1).indices
        picked = torch.zeros_like(means @ k.mT).scatter(-1, top, 1.0) * shown
        chosen = (member @ picked) > 0
        reweighted, _ = dense.weights(q, k, mask=chosen)
        p = torch.where(chosen, (p * chosen).sum(-1, keepdim=True) * reweighted, p)
    return p, chosen


class Reader(NamedTuple):
    """Clustering of queries and ``attend``, for padded and packed rows; sizes as in ``clusters``."""

    planes: Tensor  # (bits,D+1)
    clusters: int
    iterations: int
    topk: int = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, segments: Tensor | None) -> Tensor:
        """Cluster the queries and attend.

        Args:
            q: (B,H,N,D) queries.
            k: (B,H,N,D) keys.
            v: (B,H,N,E) values.
            mask: (B,N) bool, True on real tokens; None: all are.
            segments: (B,N) int64, the sequence of each token in a packed row, clustered separately; None: one sequence.

        Returns:
            The output (B,H,N,E).
        """

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            groups = pack.assign(q, self.planes, self.clusters, self.iterations, mask=mask)
            return attend(q, k, v, groups, self.clusters, topk=self.topk, mask=mask)

        if segments is None:
            return run(q, k, v, mask)
        return ragged(q, k, v, run, mask, segments, exact=True)

    def record(self, q: Tensor, k: Tensor, *, mask: Tensor | None, segments: Tensor | None) -> dict[str, Tensor]:
        """Return ``matrix`` and ``mask`` (B,H,N,N), ``groups`` (B,H,N) and, with ``topk``, ``chosen`` (B,H,N,N)."""
        batch, heads, n, _ = q.shape

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            groups = pack.assign(q, self.planes, self.clusters, self.iterations, mask=mask)
            p, reweighted = matrix(q, k, groups, self.clusters, topk=self.topk, mask=mask)
            return torch.cat([p @ v[..., :n], reweighted.to(v.dtype) @ v[..., n:-1], groups[..., None].to(v.dtype)], -1)

        # With the identity as values, the output is the attention matrix.
        q, k = upcast_half(q), upcast_half(k)
        eye = torch.eye(n, dtype=q.dtype, device=q.device)
        ones = torch.cat([eye, eye, torch.zeros_like(eye[:, :1])], -1).expand(batch, heads, -1, -1)
        found = run(q, k, ones, mask) if segments is None else ragged(q, k, ones, run, mask, segments, exact=True)
        p, reweighted, groups = found.split([n, n, 1], -1)
        groups = groups[..., 0].long()
        if mask is not None:
            groups = groups.masked_fill(~mask[:, None], self.clusters)
        allowed = visible(q.transpose(1, 2), causal=False, mask=mask, segments=segments)
        return {"matrix": p, "mask": allowed, "groups": groups} | ({"chosen": reweighted > 0} if self.topk else {})


def check(clusters: int, bits: int, iterations: int) -> None:
    """Check the options of clustering. Raises ValueError."""
    if clusters < 1 or iterations < 1:
        raise ValueError(f"clusters={clusters} and iterations={iterations} are counts; both must be at least 1")
    if not 1 <= bits <= pack.BITS:
        raise ValueError(f"bits={bits} of a hash must be from 1 to {pack.BITS}, to fit into an int64")
