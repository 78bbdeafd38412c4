"""The causal dot product, the function of the original that most code calls."""

import torch
from torch import Tensor

from ...ops import gated
from ...ops.gated.operands import check


def causal_dot_product(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    r"""Compute $\sum_{j \le i} (Q_i \cdot K_j) V_j$ without a normalizer.

    Args:
        Q: features of queries (N,H,L,E), of either sign.
        K: features of keys (N,H,L,E), of either sign.
        V: values (N,H,L,D).

    Returns:
        (N,H,L,D) in the dtype of ``V``. Half precision is summed in float32.

    Raises:
        ValueError: shapes do not fit.

    References:
        Katharopoulos et al. 2020 (2006.16236), algorithm 1.
    """
    check(query=Q, key=K, value=V)
    if K.shape[1] != V.shape[1]:
        raise ValueError(f"K has {K.shape[1]} heads and V has {V.shape[1]}; they must have the same number")
    # Autocast may convert only some of the operands, which come from different layers.
    dtype = torch.promote_types(torch.promote_types(Q.dtype, K.dtype), V.dtype)
    out, _ = gated.recur(Q.to(dtype), K.to(dtype), V.to(dtype), scale=1.0)
    return out.to(V.dtype)


class CausalDotProduct:
    """``causal_dot_product`` as ``apply``, under the name of the original's autograd function."""

    apply = staticmethod(causal_dot_product)
