"""Products of each query with a few keys, and weighted sums of their values."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...ops.compress import prototypes as tiled
from .aggregate import numbered

_ROOM = 2**24  # numbers gathered in one step


def sparse_dot_product(Q: Tensor, K: Tensor, topk: Tensor) -> Tensor:
    """Multiply each query with its own keys.

    Args:
        Q: queries (N,H,L,E).
        K: keys (N,H,S,E).
        topk: indices of the keys of each query (N,H,L,k).

    Returns:
        Products (N,H,L,k).
    """
    return _pieces(lambda q, top: torch.einsum("nhle,nhlke->nhlk", q, tiled.gathered(K, top)), Q, topk, K.shape[-1])


def sparse_weighted_average(weights: Tensor, values: Tensor, topk: Tensor) -> Tensor:
    """Sum the values of each query's own keys, with weights.

    Args:
        weights: (N,H,L,k).
        values: (N,H,S,D).
        topk: indices of the keys of each query (N,H,L,k).

    Returns:
        (N,H,L,D).
    """

    def read(w: Tensor, top: Tensor) -> Tensor:
        return torch.einsum("nhlk,nhlkd->nhld", w, tiled.gathered(values, top))

    return _pieces(read, weights, topk, values.shape[-1])


def _pieces(read: Callable[[Tensor, Tensor], Tensor], x: Tensor, topk: Tensor, size: int) -> Tensor:
    """Run ``read`` on a few queries at a time; the backward pass gathers again instead of storing."""
    together = max(1, _ROOM // max(1, topk[:, :, :1].numel() * size))
    parts = zip(x.split(together, 2), topk.split(together, 2), strict=True)
    return torch.cat([checkpoint(read, one, top, use_reentrant=False) for one, top in parts], 2)


def clustered_sparse_dot_product(
    Q: Tensor, K: Tensor, topk: Tensor, groups: Tensor, counts: Tensor, lengths: Tensor
) -> Tensor:
    """Multiply each query with the keys of its group.

    Args:
        Q: queries (N,H,L,E).
        K: keys (N,H,S,E).
        topk: indices of the keys of each group (N,H,C,k).
        groups: groups of the queries (N,H,L), as in ``aggregate``.
        counts: ignored.
        lengths: ignored.

    Returns:
        Products (N,H,L,k), zero for queries without a group.
    """
    return _clustered(lambda q, keys: q @ keys.mT, Q, K, topk, groups)


def clustered_sparse_weighted_average(
    weights: Tensor, values: Tensor, topk: Tensor, groups: Tensor, counts: Tensor
) -> Tensor:
    """Sum the values of the keys of each query's group, with weights.

    Args:
        weights: (N,H,L,k).
        values: (N,H,S,D).
        topk: indices of the keys of each group (N,H,C,k).
        groups: groups of the queries (N,H,L), as in ``aggregate``.
        counts: ignored.

    Returns:
        (N,H,L,D), zero for queries without a group.
    """
    return _clustered(torch.matmul, weights, values, topk, groups)


def _clustered(read: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, topk: Tensor, groups: Tensor) -> Tensor:
    groups = numbered(groups, clusters := topk.shape[2])
    slot, owner = tiled.tiles(groups, clusters)
    picked = topk.gather(2, owner[..., None].expand(*owner.shape, topk.shape[-1]))
    out = tiled.out_of(read(tiled.into(x, slot, owner), tiled.gathered(y, picked)), slot)
    return out.masked_fill((groups == clusters)[..., None], 0.0)
