"""Hash vectors by the sides of random planes on which they lie."""

import torch
from torch import Tensor

from ...ops.compress import clusters as pack


def compute_hashes(X: Tensor, A: Tensor, H: Tensor | None = None) -> Tensor:
    """Hash vectors: bit b is set if the product with plane b exceeds its bias.

    Args:
        X: vectors (n,D).
        A: planes (bits,D+1), with the bias as last column.
        H: buffer for the result, or None.

    Returns:
        int64 (n).

    Raises:
        ValueError: ``A`` does not have D+1 columns, or has more than 63 rows.
    """
    if A.shape[1] != X.shape[1] + 1 or len(A) > pack.BITS:
        raise ValueError(
            f"The hash requires a bias: A must be (bits, {X.shape[1] + 1}) with at most {pack.BITS} bits, "
            f"not {tuple(A.shape)}"
        )
    found = pack.hashes(X, A)
    return found if H is None else H.copy_(found)


class hash_cpu:
    """Hash functions under the names of the original's extension, which write into their last argument."""

    compute_hashes = staticmethod(compute_hashes)

    @staticmethod
    def compute_hashes_from_projections(P: Tensor, H: Tensor) -> None:
        """Write hashes of the signs of ``P`` (n,bits) into ``H`` int64 (n)."""
        H.copy_(((P > 0).long() << torch.arange(P.shape[1], device=P.device)).sum(-1))
