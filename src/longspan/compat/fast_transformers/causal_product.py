"""The causal sum of outer products, read by the queries: what most users of the original call."""

import torch
from torch import Tensor

from ...ops import gated


def causal_dot_product(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """sum_{j<=i} (Q_i . K_j) V_j without a normaliser; Q and K are features of either sign.

    Q, K (N,H,L,E), V (N,H,L,D) -> (N,H,L,D) in V's dtype; half precision is summed in float32.

    Source: Katharopoulos et al. 2020 (2006.16236), algorithm 1. Raises ValueError for shapes that do not fit.
    """
    gated.check(Q, K, V, None, None, None, None, None, None, None)
    if K.shape[1] != V.shape[1]:
        raise ValueError(f"K has {K.shape[1]} heads and V has {V.shape[1]}; they must have as many")
    # Autocast converts some of three operands that came from different layers.
    dtype = torch.promote_types(torch.promote_types(Q.dtype, K.dtype), V.dtype)
    out, _ = gated.recur(Q.to(dtype), K.to(dtype), V.to(dtype), scale=1.0)
    return out.to(V.dtype)


class CausalDotProduct:
    """The same under the name of the original's autograd function, whose ``apply`` is called from outside."""

    apply = staticmethod(causal_dot_product)
