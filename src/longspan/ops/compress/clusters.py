"""Clusters of vectors that point the same way: hashes, k-means among hashes, the members' mean, and back to them.

``C`` is the number of clusters, groups (B,H,N) int64 are the cluster of each vector, and C stands for none.
"""

import torch
from torch import Tensor

from ..backends import select_backend
from ..tensors import upcast_half

BITS = 63  # of an int64 that is never negative
ROOM = 2**26  # distances that exist at once


@torch.no_grad()
def assign(x: Tensor, planes: Tensor, clusters: int, iterations: int, *, mask: Tensor | None = None) -> Tensor:
    """The cluster of each vector: x (B,H,N,D), planes (bits,D+1), mask (B,N) bool -> groups (B,H,N) int64.

    k-means among the hashes of each row and head on their own, so that vectors with one hash share a cluster. Where
    there are no more vectors than clusters, each is a cluster of its own. Neither the order of the vectors nor what is
    masked changes who is with whom; masked ones get C. There is no gradient.

    Source: Vyas et al. 2020 (2007.04825), section 3.2.
    """
    n = x.shape[2]
    real = torch.ones(len(x), n, dtype=torch.bool, device=x.device) if mask is None else mask
    own = (real.long().cumsum(1) - 1).masked_fill(~real, clusters)[:, None].expand(x.shape[:3])
    if n <= clusters:
        return own.contiguous()
    groups, _ = kmeans(hashes(x, planes), clusters, iterations, len(planes), mask=mask)
    return groups if mask is None else torch.where(mask.sum(1)[:, None, None] <= clusters, own, groups)


@torch.no_grad()
def hashes(x: Tensor, planes: Tensor) -> Tensor:
    """On which side of each plane a vector is: x (...,D), planes (bits,D+1) -> (...) int64.

    Bit b is 1 where $x \\cdot a_b > c_b$; the last column of ``planes`` is c. float32 at least.
    """
    with torch.autocast(x.device.type, enabled=False):
        x = upcast_half(x)
        planes = planes.to(x.dtype)
        beyond = x @ planes[:, :-1].mT > planes[:, -1]
    return (beyond.long() << torch.arange(len(planes), device=x.device)).sum(-1)


@torch.no_grad()
def kmeans(
    codes: Tensor,
    clusters: int,
    iterations: int,
    bits: int,
    *,
    mask: Tensor | None = None,
    centroids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm by Hamming distance: codes (B,H,N) int64 -> groups (B,H,N), centroids (B,H,C) int64.

    A code goes to the nearest centroid, of several to the first; each bit of a centroid is that of most of its members,
    0 in a tie; ``iterations`` counts the former steps. A centroid without members stays. The first ``centroids`` are
    given (B,H,C), or those codes of the row and head, among real ones, that divide the different ones, in ascending
    order, evenly. mask (B,N) bool: what it hides has no part and gets group C.
    """
    real = torch.ones_like(codes[:, 0], dtype=torch.bool) if mask is None else mask
    if centroids is None:
        centroids = _first(codes, real, clusters)
    if not codes.numel():
        return torch.full_like(codes, clusters), centroids
    lloyd = _reference if select_backend("clustering") == "reference" else _lloyd
    rows = max(1, ROOM // (codes[0].numel() * clusters))
    parts = zip(codes.split(rows), centroids.split(rows), real.split(rows), strict=True)
    found = [lloyd(code, centre, there, iterations, bits) for code, centre, there in parts]
    return torch.cat([groups for groups, _ in found]), torch.cat([centre for _, centre in found])


def _first(codes: Tensor, real: Tensor, clusters: int) -> Tensor:
    """Real codes (B,H,C), evenly spaced among the different ones; the last again and again where these are fewer."""
    if not codes.shape[-1]:
        return codes.new_zeros(*codes.shape[:2], clusters)
    last = torch.iinfo(torch.int64).max
    ordered = codes.masked_fill(~real[:, None], last).sort(-1).values
    there = torch.arange(codes.shape[-1], device=codes.device) < real.sum(1)[:, None, None]
    new = there & torch.nn.functional.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0), value=True)
    number = new.long().cumsum(-1)  # of a code among the different ones, from 1
    slots = torch.arange(clusters, device=codes.device)
    rank = slots * number[..., -1:].clamp(min=clusters) // clusters + 1
    at = torch.searchsorted(number, torch.minimum(rank, number[..., -1:]))
    return ordered.gather(-1, at.clamp(max=codes.shape[-1] - 1))


def _lloyd(codes: Tensor, centroids: Tensor, real: Tensor, iterations: int, bits: int) -> tuple[Tensor, Tensor]:
    # Of signs instead of bits, the product falls as the distance grows.
    signs, centres, clusters = _signs(codes, bits), _signs(centroids, bits), centroids.shape[-1]

    def nearest() -> Tensor:
        return (signs @ centres.mT).max(-1).indices.masked_fill(~real[:, None], clusters)

    groups = nearest()
    for _ in range(iterations - 1):
        votes = total(signs, groups, clusters)
        taken = (count(groups, clusters) > 0)[..., None]
        centres = torch.where(taken, torch.where(votes > 0, 1.0, -1.0).to(centres.dtype), centres)
        groups = nearest()
    return groups, ((centres > 0).long() << torch.arange(bits, device=codes.device)).sum(-1)


def _signs(codes: Tensor, bits: int) -> Tensor:
    """(...) int64 -> (...,bits) of 1 and -1 in float32, which holds their sums."""
    return ((codes[..., None] >> torch.arange(bits, device=codes.device)) & 1).float() * 2 - 1


def _reference(codes: Tensor, centroids: Tensor, real: Tensor, iterations: int, bits: int) -> tuple[Tensor, Tensor]:
    """The same, code by code."""
    groups, centroids = torch.full_like(codes, centroids.shape[-1]), centroids.clone()
    for row in range(codes.shape[0]):
        for head in range(codes.shape[1]):
            centres = centroids[row, head].tolist()
            members = {i: int(codes[row, head, i]) for i in real[row].nonzero()[:, 0].tolist()}
            nearest: dict[int, int] = {}
            for step in range(iterations):
                for i, code in members.items():
                    nearest[i] = min(range(len(centres)), key=lambda c: ((code ^ centres[c]).bit_count(), c))
                for c in range(len(centres)) if step < iterations - 1 else ():
                    own = [code for i, code in members.items() if nearest[i] == c]
                    most = [2 * sum(code >> bit & 1 for code in own) > len(own) for bit in range(bits)]
                    centres[c] = sum(one << bit for bit, one in enumerate(most)) if own else centres[c]
            for i, c in nearest.items():
                groups[row, head, i] = c
            centroids[row, head] = torch.tensor(centres)
    return groups, centroids


def count(groups: Tensor, clusters: int) -> Tensor:
    """How many members each cluster has: groups (B,H,N) -> (B,H,C) int64."""
    zeros = groups.new_zeros(*groups.shape[:2], clusters + 1)
    return zeros.scatter_add(-1, groups, torch.ones_like(groups))[..., :-1]


def total(x: Tensor, groups: Tensor, clusters: int) -> Tensor:
    """The sum of each cluster's members: x (B,H,N,D), groups (B,H,N) -> (B,H,C,D), 0 for an empty one."""
    zeros = x.new_zeros(*groups.shape[:2], clusters + 1, x.shape[-1])
    return zeros.scatter_add(2, groups[..., None].expand_as(x), x)[:, :, :-1]


def mean(x: Tensor, groups: Tensor, clusters: int) -> Tensor:
    """Pack: the mean of each cluster's members, x (B,H,N,D), groups (B,H,N) -> (B,H,C,D), 0 for an empty one.

    A member's gradient is that of its mean, divided by the number of members. Summed in float32 at least.
    """
    members = count(groups, clusters).clamp(min=1)[..., None]
    return (total(upcast_half(x), groups, clusters) / members).to(x.dtype)


def spread(y: Tensor, groups: Tensor) -> Tensor:
    """Unpack: every member gets what its cluster has, y (B,H,C,E), groups (B,H,N) -> (B,H,N,E), 0 without a cluster."""
    y = torch.nn.functional.pad(y, (0, 0, 0, 1))
    return y.gather(2, groups[..., None].expand(*groups.shape, y.shape[-1]))
