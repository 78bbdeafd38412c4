"""Hashes that tell on which sides of random planes a vector is."""

import torch
from torch import Tensor

from ...ops.compress import clusters as pack


def compute_hashes(X: Tensor, A: Tensor, H: Tensor | None = None) -> Tensor:
    """X (n,D), A (bits,D+1), whose last column is compared with -> int64 (n), in the buffer ``H`` where it is given.

    Raises ValueError unless ``A`` has a column more than ``X``, and at most 63 rows.
    """
    if A.shape[1] != X.shape[1] + 1 or len(A) > pack.BITS:
        raise ValueError(
            f"The hash requires a bias: A must be (bits, {X.shape[1] + 1}) with at most {pack.BITS} bits, "
            f"not {tuple(A.shape)}"
        )
    found = pack.hashes(X, A)
    return found if H is None else H.copy_(found)


class hash_cpu:
    """The same under the names of the original's extension, which writes into its last argument."""

    compute_hashes = staticmethod(compute_hashes)

    @staticmethod
    def compute_hashes_from_projections(P: Tensor, H: Tensor) -> None:
        """P (n,bits), compared with zero -> H int64 (n)."""
        H.copy_(((P > 0).long() << torch.arange(P.shape[1], device=P.device)).sum(-1))
