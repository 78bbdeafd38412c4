"""Learned projections along the sequence: weighted sums of the tokens, with a weight for each position."""

from torch import Tensor

from .. import rows
from ..backends import select_backend
from ..operands import zero_masked
from ..tensors import merge, positions, split

OP = "a projection over the length"


def project(x: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Project N tokens to S slots in O(N S D) time and O(N D) memory.

    Slot s is the sum over real tokens j of ``weight[s, position of j] * x_j``. A shorter sequence uses fewer columns of
    the weight.

    Args:
        x: (B,H,N,D) tokens, at most L real ones in a row.
        weight: (H|1,S,L) weights.
        mask: (B,N) bool, True on real tokens; None: all are. Masked tokens are never read, and positions count only
            real tokens.

    Returns:
        The slots (B,H,S,D).

    References:
        Wang et al. 2020 (2006.04768), eq. 7: E K and F V.
    """
    if select_backend(OP) == "reference":
        return columns(x, weight, mask) @ zero_masked(mask, x)[0]
    (x,) = rows.gather_valid(mask, *zero_masked(mask, x), axis=2)
    n = min(x.shape[2], weight.shape[-1])
    x, weight = x[:, :, :n], weight[..., :n]
    if len(weight) > 1:
        return weight @ x
    # One product for all heads; merging them is a view if they were split from one tensor.
    return split(weight[0] @ merge(x), x.shape[1])


def columns(x: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the weight of each token, (B,H|1,S,N); the definition of ``project`` multiplies it with the tokens."""
    at, _ = positions(x.transpose(1, 2), mask=mask)
    if mask is None:
        return weight[..., : x.shape[2]][None]
    picked = weight[..., at.masked_fill(~mask, 0)].movedim(2, 0)  # (B,H|1,S,N)
    return picked.masked_fill(~mask[:, None, None], 0.0)
