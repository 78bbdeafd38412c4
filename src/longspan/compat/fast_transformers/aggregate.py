"""Sums of the vectors of a group, and what groups have back to their members.

``G`` (N,H,L) are the groups of the vectors; a number that is none of 0 to C - 1 stands for no group.
"""

from torch import Tensor

from ...ops.compress import clusters as pack
from .absent import function


def aggregate(X: Tensor, G: Tensor, F: Tensor, Y: Tensor | None = None) -> Tensor:
    """sum of F_c X_l over the l in group c: X (N,H,L,E), factors F (N,H,C) -> (N,H,C,E), in the buffer ``Y`` if given.

    Zero for an empty group, whatever its factor.
    """
    groups = numbered(G, F.shape[-1])
    found = pack.total(X * pack.spread(F[..., None], groups), groups, F.shape[-1])
    return found if Y is None else Y.copy_(found)


def broadcast(Y: Tensor, G: Tensor, F: Tensor, X: Tensor | None = None) -> Tensor:
    """F_c Y_c for every l in group c: Y (N,H,C,E) -> (N,H,L,E), in the buffer ``X`` if given.

    Without a group: zero, or what the buffer has.
    """
    groups = numbered(G, F.shape[-1])
    found = pack.spread(Y * F[..., None], groups)
    return found if X is None else X.copy_(found.where((groups < F.shape[-1])[..., None], X))


def clustered_aggregate(X: Tensor, G: Tensor, F: Tensor, lengths: Tensor, Y: Tensor | None = None) -> Tensor:
    """``aggregate``; the original wants sorted groups on a GPU. What is behind ``lengths`` (N,) has no group in G."""
    return aggregate(X, G, F, Y)


def clustered_broadcast(Y: Tensor, groups: Tensor, counts: Tensor, factors: Tensor, X: Tensor | None = None) -> Tensor:
    """``broadcast``; the original wants sorted groups on a GPU, and their ``counts``."""
    return broadcast(Y, groups, factors, X)


def aggregate_cpu(X: Tensor, G: Tensor, F: Tensor, Y: Tensor) -> None:
    """``aggregate`` added to ``Y``, as the original's extension does."""
    Y.add_(aggregate(X, G, F).view_as(Y))


def broadcast_cpu(Y: Tensor, G: Tensor, F: Tensor, X: Tensor) -> None:
    """``broadcast`` into ``X``."""
    broadcast(Y, G, F, X)


def numbered(G: Tensor, clusters: int) -> Tensor:
    """Groups as int64, where C stands for none."""
    return G.long().where((G >= 0) & (G < clusters), clusters)


set_group = function("aggregate.set_group")
