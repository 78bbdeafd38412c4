"""k-means of hashes by Hamming distance."""

import torch
from torch import Tensor

from ....ops.compress import clusters as pack


def cluster(
    hashes: Tensor,
    lengths: Tensor,
    groups: Tensor | None = None,
    counts: Tensor | None = None,
    centroids: Tensor | None = None,
    distances: Tensor | None = None,
    bitcounts: Tensor | None = None,
    clusters: int = 30,
    iterations: int = 10,
    bits: int = 32,
) -> tuple[Tensor, Tensor]:
    """Cluster hashes by k-means. The first centroids are hashes that divide the distinct ones evenly.

    Args:
        hashes: int64 (N,H,L).
        lengths: number of hashes of each row (N,).
        groups: buffer for the groups, or None.
        counts: buffer for the counts, or None.
        centroids: buffer (N,H,C) for the centroids, or None. Its C overrides ``clusters``.
        distances: ignored.
        bitcounts: ignored.
        clusters: number of clusters C.
        iterations: number of iterations.
        bits: number of lowest bits of a hash that are compared.

    Returns:
        Groups int32 (N,H,L), C + 1 after a row's length, and counts int32 (N,H,C).
    """
    many = clusters if centroids is None else centroids.shape[-1]
    mask = torch.arange(hashes.shape[-1], device=hashes.device) < lengths[:, None]
    found, centres = pack.kmeans(hashes & (2**bits - 1), many, max(1, iterations), bits, mask=mask)
    sizes = pack.count(found, many).int()
    found = torch.where(found == many, many + 1, found).int()
    if centroids is not None:
        centroids.copy_(centres)
    return _kept(groups, found), _kept(counts, sizes)


def _kept(buffer: Tensor | None, found: Tensor) -> Tensor:
    return found if buffer is None else buffer.copy_(found)


def cluster_cpu(
    hashes: Tensor,
    lengths: Tensor,
    centroids: Tensor,
    groups: Tensor,
    counts: Tensor,
    iterations: int,
    bits: int,
) -> None:
    """Call ``cluster`` with buffers, in the form of the original's extension."""
    cluster(hashes, lengths, groups, counts, centroids, iterations=iterations, bits=bits)
