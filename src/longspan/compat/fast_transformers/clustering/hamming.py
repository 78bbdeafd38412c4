"""k-means among hashes, by Hamming distance."""

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
    """hashes int64 (N,H,L), lengths (N,) -> groups int32 (N,H,L), counts int32 (N,H,C); C + 1 behind a length.

    The ``bits`` lowest bits of a hash count. ``groups``, ``counts`` and ``centroids`` (N,H,C), whose C goes before
    ``clusters``, are buffers to be overwritten; ``distances`` and ``bitcounts``, for which there is no use here, stay.
    The first centroids are hashes before the length, those that divide the different ones evenly.
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
    """``cluster`` into buffers, as the original's extension is called."""
    cluster(hashes, lengths, groups, counts, centroids, iterations=iterations, bits=bits)
