"""Products with a few keys of each query, and sums of their values."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...ops.compress import prototypes as tiled
from .aggregate import numbered

_ROOM = 2**24  # numbers gathered at once


def sparse_dot_product(Q: Tensor, K: Tensor, topk: Tensor) -> Tensor:
    """Q (N,H,L,E) with those of K (N,H,S,E) that ``topk`` (N,H,L,k) tells by number -> (N,H,L,k)."""
    return _pieces(lambda q, top: torch.einsum("nhle,nhlke->nhlk", q, tiled.gathered(K, top)), Q, topk, K.shape[-1])


def sparse_weighted_average(weights: Tensor, values: Tensor, topk: Tensor) -> Tensor:
    """sum over k of weights (N,H,L,k) times those of values (N,H,S,D) that ``topk`` (N,H,L,k) tells -> (N,H,L,D)."""

    def read(w: Tensor, top: Tensor) -> Tensor:
        return torch.einsum("nhlk,nhlkd->nhld", w, tiled.gathered(values, top))

    return _pieces(read, weights, topk, values.shape[-1])


def _pieces(read: Callable[[Tensor, Tensor], Tensor], x: Tensor, topk: Tensor, size: int) -> Tensor:
    """``read`` for some queries at a time; what it gathers is gathered again for the gradients, and not kept."""
    together = max(1, _ROOM // max(1, topk[:, :, :1].numel() * size))
    parts = zip(x.split(together, 2), topk.split(together, 2), strict=True)
    return torch.cat([checkpoint(read, one, top, use_reentrant=False) for one, top in parts], 2)  # type: ignore[misc]


def clustered_sparse_dot_product(
    Q: Tensor, K: Tensor, topk: Tensor, groups: Tensor, counts: Tensor, lengths: Tensor
) -> Tensor:
    """The same with keys for each group: topk (N,H,C,k), groups (N,H,L) as in ``aggregate`` -> (N,H,L,k).

    Zero without a group. ``counts`` and ``lengths`` follow from the groups.
    """
    return _clustered(lambda q, keys: q @ keys.mT, Q, K, topk, groups)


def clustered_sparse_weighted_average(
    weights: Tensor, values: Tensor, topk: Tensor, groups: Tensor, counts: Tensor
) -> Tensor:
    """weights (N,H,L,k) times the values (N,H,S,D) of a group's keys, topk (N,H,C,k) -> (N,H,L,D)."""
    return _clustered(torch.matmul, weights, values, topk, groups)


def _clustered(read: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, topk: Tensor, groups: Tensor) -> Tensor:
    groups = numbered(groups, clusters := topk.shape[2])
    slot, owner = tiled.tiles(groups, clusters)
    picked = topk.gather(2, owner[..., None].expand(*owner.shape, topk.shape[-1]))
    out = tiled.out_of(read(tiled.into(x, slot, owner), tiled.gathered(y, picked)), slot)
    return out.masked_fill((groups == clusters)[..., None], 0.0)
