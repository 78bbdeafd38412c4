"""The pseudo-inverse of small matrices, exactly or by products alone."""

import torch
from torch import Tensor

from ..tensors import upcast_half


def inverse(a: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of each matrix: by ``newton_schulz``, or exactly where ``iterations`` is 0.

    a (...,m,m) -> (...,m,m), in float32 or float64. Rows and columns of zeros stay zeros.
    """
    a = upcast_half(a)
    with torch.autocast(a.device.type, enabled=False):
        return torch.linalg.pinv(a) if iterations == 0 else newton_schulz(a, iterations)


def newton_schulz(a: Tensor, iterations: int) -> Tensor:
    """Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, at first A^T / (|A|_1 |A|_inf): a (...,m,m) -> (...,m,m).

    It converges to the inverse with an order of three. |A|_1 and |A|_inf, the largest sum of a column and of a row, are
    those of each matrix: their maximum over a batch, as has been published too, would make rows depend on each other.

    Source: Razavi et al. 2014, as in Xiong et al. 2021 (2102.03902), eq. 11.
    """
    size = a.abs()
    norms = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    z = a.mT / norms.clamp(min=torch.finfo(a.dtype).tiny)[..., None, None]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z
