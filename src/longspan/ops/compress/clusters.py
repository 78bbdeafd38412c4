"""Clusters of vectors by direction: hashing, k-means on the hashes, means of clusters, and scatter back to members.

C is the number of clusters. ``groups`` (B,H,N) int64 holds the cluster of each vector; C means that it has none.
"""

import torch
from torch import Tensor

from ..backends import select_backend
from ..tensors import upcast_half

BITS = 63  # of a non-negative int64
MAX_DISTANCES = 2**26  # distances in memory at a time


@torch.no_grad()
def assign(x: Tensor, planes: Tensor, clusters: int, iterations: int, *, mask: Tensor | None = None) -> Tensor:
    """Assign each vector to a cluster, by k-means on the hashes of each row and head; there is no gradient.

    Vectors with equal hashes share a cluster. If a row has at most C vectors, each gets a separate cluster. The order
    of the vectors and masked vectors do not affect which vectors share a cluster.

    Args:
        x: (B,H,N,D) vectors.
        planes: (bits,D+1) planes of the hash; see ``hashes``.
        clusters: Number of clusters, C.
        iterations: Assignment steps of k-means.
        mask: (B,N) bool, True on real vectors; None: all are. Masked ones get C.

    Returns:
        The groups (B,H,N) int64.

    References:
        Vyas et al. 2020 (2007.04825), section 3.2.
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
    """Hash vectors by the side of each plane on which they lie, in float32 or float64.

    Args:
        x: (...,D) vectors.
        planes: (bits,D+1) normals a of the planes and, in the last column, their offsets c.

    Returns:
        The hashes (...) int64; bit b is 1 where $x \\cdot a_b > c_b$.
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
    """Run Lloyd's algorithm with the Hamming distance.

    A code goes to the nearest centroid, or to the first of several. Each bit of a centroid is the majority bit of its
    members, 0 in a tie. A centroid without members stays as it is.

    Args:
        codes: (B,H,N) int64 hashes.
        clusters: Number of clusters, C.
        iterations: Number of assignment steps, at least 1.
        bits: Bits of a hash.
        mask: (B,N) bool, True on real codes; None: all are. Masked codes are ignored and get group C.
        centroids: (B,H,C) int64 initial centroids; None: codes of the row and head, evenly spaced among its distinct
            real codes in ascending order.

    Returns:
        The groups (B,H,N) and the centroids (B,H,C), int64 each.
    """
    real = torch.ones_like(codes[:, 0], dtype=torch.bool) if mask is None else mask
    if centroids is None:
        centroids = _initial_centroids(codes, real, clusters)
    if not codes.numel():
        return torch.full_like(codes, clusters), centroids
    lloyd = _reference if select_backend("clustering") == "reference" else _lloyd
    rows = max(1, MAX_DISTANCES // (codes[0].numel() * clusters))
    parts = zip(codes.split(rows), centroids.split(rows), real.split(rows), strict=True)
    found = [lloyd(code, center, there, iterations, bits) for code, center, there in parts]
    return torch.cat([groups for groups, _ in found]), torch.cat([center for _, center in found])


def _initial_centroids(codes: Tensor, real: Tensor, clusters: int) -> Tensor:
    """Real codes (B,H,C), evenly spaced among the distinct ones; if there are fewer than C, the last one repeats."""
    if not codes.shape[-1]:
        return codes.new_zeros(*codes.shape[:2], clusters)
    last = torch.iinfo(torch.int64).max
    ordered = codes.masked_fill(~real[:, None], last).sort(-1).values
    there = torch.arange(codes.shape[-1], device=codes.device) < real.sum(1)[:, None, None]
    new = there & torch.nn.functional.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0), value=True)
    number = new.long().cumsum(-1)  # of a code among the distinct ones, from 1
    slots = torch.arange(clusters, device=codes.device)
    rank = slots * number[..., -1:].clamp(min=clusters) // clusters + 1
    at = torch.searchsorted(number, torch.minimum(rank, number[..., -1:]))
    return ordered.gather(-1, at.clamp(max=codes.shape[-1] - 1))


def _lloyd(codes: Tensor, centroids: Tensor, real: Tensor, iterations: int, bits: int) -> tuple[Tensor, Tensor]:
    # With signs instead of bits, the nearest centroid has the largest product.
    signs, centers, clusters = _signs(codes, bits), _signs(centroids, bits), centroids.shape[-1]

    def nearest() -> Tensor:
        return (signs @ centers.mT).max(-1).indices.masked_fill(~real[:, None], clusters)

    groups = nearest()
    for _ in range(iterations - 1):
        votes = total(signs, groups, clusters)
        taken = (count(groups, clusters) > 0)[..., None]
        centers = torch.where(taken, torch.where(votes > 0, 1.0, -1.0).to(centers.dtype), centers)
        groups = nearest()
    return groups, ((centers > 0).long() << torch.arange(bits, device=codes.device)).sum(-1)


def _signs(codes: Tensor, bits: int) -> Tensor:
    """(...) int64 -> (...,bits) of 1 and -1, in float32 for exact sums."""
    return ((codes[..., None] >> torch.arange(bits, device=codes.device)) & 1).float() * 2 - 1


def _reference(codes: Tensor, centroids: Tensor, real: Tensor, iterations: int, bits: int) -> tuple[Tensor, Tensor]:
    """``_lloyd`` for one code at a time."""
    groups, centroids = torch.full_like(codes, centroids.shape[-1]), centroids.clone()
    for row in range(codes.shape[0]):
        for head in range(codes.shape[1]):
            centers = centroids[row, head].tolist()
            members = {i: int(codes[row, head, i]) for i in real[row].nonzero()[:, 0].tolist()}
            nearest: dict[int, int] = {}
            for step in range(iterations):
                for i, code in members.items():
                    nearest[i] = min(range(len(centers)), key=lambda c: ((code ^ centers[c]).bit_count(), c))
                for c in range(len(centers)) if step < iterations - 1 else ():
                    own = [code for i, code in members.items() if nearest[i] == c]
                    most = [2 * sum(code >> bit & 1 for code in own) > len(own) for bit in range(bits)]
                    centers[c] = sum(one << bit for bit, one in enumerate(most)) if own else centers[c]
            for i, c in nearest.items():
                groups[row, head, i] = c
            centroids[row, head] = torch.tensor(centers)
    return groups, centroids


def count(groups: Tensor, clusters: int) -> Tensor:
    """Count the members of each cluster: groups (B,H,N) -> (B,H,C) int64."""
    zeros = groups.new_zeros(*groups.shape[:2], clusters + 1)
    return zeros.scatter_add(-1, groups, torch.ones_like(groups))[..., :-1]


def total(x: Tensor, groups: Tensor, clusters: int) -> Tensor:
    """Sum the members of each cluster: x (B,H,N,D), groups (B,H,N) -> (B,H,C,D), 0 for an empty cluster."""
    zeros = x.new_zeros(*groups.shape[:2], clusters + 1, x.shape[-1])
    return zeros.scatter_add(2, groups[..., None].expand_as(x), x)[:, :, :-1]


def mean(x: Tensor, groups: Tensor, clusters: int) -> Tensor:
    """Average the members of each cluster, with sums in float32 or float64.

    The gradient of a member is that of the mean, divided by the number of members.

    Args:
        x: (B,H,N,D) vectors.
        groups: (B,H,N) int64, the cluster of each vector, C for none.
        clusters: Number of clusters, C.

    Returns:
        The means (B,H,C,D), 0 for an empty cluster.
    """
    members = count(groups, clusters).clamp(min=1)[..., None]
    return (total(upcast_half(x), groups, clusters) / members).to(x.dtype)


def spread(y: Tensor, groups: Tensor) -> Tensor:
    """Copy each cluster's row to its members: y (B,H,C,E), groups (B,H,N) -> (B,H,N,E), 0 without a cluster."""
    y = torch.nn.functional.pad(y, (0, 0, 0, 1))
    return y.gather(2, groups[..., None].expand(*groups.shape, y.shape[-1]))
