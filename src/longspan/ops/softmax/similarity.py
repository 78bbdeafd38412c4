"""Attention for non-negative similarities, as a matrix: o_i = sum_j s(q_i, k_j) v_j / sum_j s(q_i, k_j)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._utils.spec import known
from ..backends import select_backend

SIMILARITIES = {
    "exp": "e^(q.k / sqrt D), which is softmax",
    "polynomial": "(q.k / sqrt D + constant)^degree",
    "rbf": "e^(-|q - k|^2 / (2 bandwidth^2 sqrt D))",
}


def weights(
    q: Tensor, k: Tensor, allowed: Tensor, *, similarity: str, degree: int, constant: float, bandwidth: float
) -> Tensor:
    """Return each query's weights over the allowed keys. They sum to 1, or are all 0 if all similarities are 0.

    Args:
        q: (B,H,N,D).
        k: (B,H,M,D).
        allowed: Bool, broadcast to (B,H,N,M), True = may be seen.
        similarity: A name in ``SIMILARITIES``.
        degree: The degree of ``polynomial``.
        constant: The constant of ``polynomial``.
        bandwidth: The bandwidth of ``rbf``.

    Returns:
        (B,H,N,M), float32 at least. O(N M) memory.

    Raises:
        ValueError: the similarity is unknown.

    References:
        Katharopoulos et al. 2020 (2006.16236), eq. 3 and section 3.2.1; Tsai et al. 2019 (1908.11775).
    """
    select_backend("kernel attention")
    known(similarity, SIMILARITIES, "similarity")
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k, scale = q.to(wide), k.to(wide), q.shape[-1] ** -0.5
        products = q @ k.mT * scale
        if similarity == "polynomial":
            base = (products + constant) * allowed
            # A factor per query cancels in the ratio; this one prevents overflow for high degrees.
            largest = F.pad(base.detach().abs(), (0, 1)).amax(-1, keepdim=True)
            s = (base / largest.clamp(min=torch.finfo(wide).tiny)) ** degree
            return s / s.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
        if similarity == "rbf":
            # |q|^2 is the same for all keys of a query, so it cancels in the ratio.
            products = (products - k.square().sum(-1)[..., None, :] * (scale / 2)) / bandwidth**2
        return products.masked_fill(~allowed, torch.finfo(wide).min).softmax(-1) * allowed


def attend(p: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Apply weights (B,H,N,M) to values (B,H,M,E) -> (B,H,N,E) in v's dtype."""
    with torch.autocast(v.device.type, enabled=False):
        return (F.dropout(p, dropout) @ v.to(p.dtype)).to(v.dtype)
