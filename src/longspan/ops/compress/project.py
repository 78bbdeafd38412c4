"""Learned projections over the length: k weighted sums of the tokens, a weight for each position."""

from torch import Tensor

from .. import rows
from ..backends import select_backend
from ..operands import zero_masked
from ..tensors import merge, positions, split

OP = "a projection over the length"


def project(x: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Slot s is the sum over real tokens j of weight[s, position of j] x_j: a shorter sequence uses fewer columns.

    x (B,H,N,D), weight (H|1,S,L), mask (B,N) bool, at most L real tokens in a row -> (B,H,S,D). What a masked token
    holds is not read, and the real tokens' positions count real tokens alone. Time O(N S D), memory O(N D).

    Source: Wang et al. 2020 (2006.04768), eq. 7: E K and F V.
    """
    if select_backend(OP) == "reference":
        return columns(x, weight, mask) @ zero_masked(mask, x)[0]
    (x,) = rows.gather_valid(mask, *zero_masked(mask, x), axis=2)
    n = min(x.shape[2], weight.shape[-1])
    x, weight = x[:, :, :n], weight[..., :n]
    if len(weight) > 1:
        return weight @ x
    # All heads side by side are one product, of a view where they come from one.
    return split(weight[0] @ merge(x), x.shape[1])


def columns(x: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """The weights token by token, with which ``project`` is one product: (B,H|1,S,N). The definition."""
    at, _ = positions(x.transpose(1, 2), mask=mask)
    if mask is None:
        return weight[..., : x.shape[2]][None]
    picked = weight[..., at.masked_fill(~mask, 0)].movedim(2, 0)  # (B,H|1,S,N)
    return picked.masked_fill(~mask[:, None, None], 0.0)
