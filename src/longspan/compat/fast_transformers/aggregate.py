"""Sum the vectors of each group, and copy values of groups back to their members.

``G`` (N,H,L) are the groups of the vectors. Numbers outside 0 to C - 1 mean no group.
"""

from torch import Tensor

from ...ops.compress import clusters as pack
from .absent import function


def aggregate(X: Tensor, G: Tensor, F: Tensor, Y: Tensor | None = None) -> Tensor:
    """Sum the vectors of each group, times the factor of the group.

    Args:
        X: vectors (N,H,L,E).
        G: groups (N,H,L).
        F: factors (N,H,C).
        Y: buffer for the result, or None.

    Returns:
        (N,H,C,E), zero for an empty group.
    """
    groups = numbered(G, F.shape[-1])
    found = pack.total(X * pack.spread(F[..., None], groups), groups, F.shape[-1])
    return found if Y is None else Y.copy_(found)


def broadcast(Y: Tensor, G: Tensor, F: Tensor, X: Tensor | None = None) -> Tensor:
    """Copy the value of each group, times its factor, to the members of the group.

    Args:
        Y: values (N,H,C,E).
        G: groups (N,H,L).
        F: factors (N,H,C).
        X: buffer for the result, or None.

    Returns:
        (N,H,L,E). Vectors without a group keep the value of the buffer, or are zero without a buffer.
    """
    groups = numbered(G, F.shape[-1])
    found = pack.spread(Y * F[..., None], groups)
    return found if X is None else X.copy_(found.where((groups < F.shape[-1])[..., None], X))


def clustered_aggregate(X: Tensor, G: Tensor, F: Tensor, lengths: Tensor, Y: Tensor | None = None) -> Tensor:
    """Call ``aggregate``. Groups need not be sorted; vectors after ``lengths`` (N,) have no group in ``G``."""
    return aggregate(X, G, F, Y)


def clustered_broadcast(Y: Tensor, groups: Tensor, counts: Tensor, factors: Tensor, X: Tensor | None = None) -> Tensor:
    """Call ``broadcast``. Groups need not be sorted, and ``counts`` is ignored."""
    return broadcast(Y, groups, factors, X)


def aggregate_cpu(X: Tensor, G: Tensor, F: Tensor, Y: Tensor) -> None:
    """Add the result of ``aggregate`` to ``Y``, as the original's extension does."""
    Y.add_(aggregate(X, G, F).view_as(Y))


def broadcast_cpu(Y: Tensor, G: Tensor, F: Tensor, X: Tensor) -> None:
    """Write the result of ``broadcast`` into ``X``."""
    broadcast(Y, G, F, X)


def numbered(G: Tensor, clusters: int) -> Tensor:
    """Convert groups to int64, with C for no group."""
    return G.long().where((G >= 0) & (G < clusters), clusters)


set_group = function("aggregate.set_group")
