"""The pseudo-inverse of small matrices, exact or iterative."""

import torch
from torch import Tensor

from ..tensors import upcast_half


def inverse(a: Tensor, iterations: int) -> Tensor:
    """Compute the Moore-Penrose inverse of each matrix.

    Rows and columns of zeros stay zeros.

    Args:
        a: (...,m,m) matrices.
        iterations: Steps of ``newton_schulz``; 0 computes the exact inverse.

    Returns:
        The inverses (...,m,m), in float32 or float64.
    """
    a = upcast_half(a)
    with torch.autocast(a.device.type, enabled=False):
        return torch.linalg.pinv(a) if iterations == 0 else newton_schulz(a, iterations)


def newton_schulz(a: Tensor, iterations: int) -> Tensor:
    r"""Iterate $Z \leftarrow Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4$ from $Z = A^\top / (|A|_1 |A|_\infty)$.

    The iteration converges to the inverse with order three. The norms, the largest column sum and the largest row sum,
    are computed for each matrix. Published code takes their maximum over the batch, which makes rows depend on each
    other.

    Args:
        a: (...,m,m) matrices.
        iterations: Number of steps.

    Returns:
        The approximate inverses (...,m,m).

    References:
        Razavi et al. 2014, as in Xiong et al. 2021 (2102.03902), eq. 11.
    """
    size = a.abs()
    norms = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    z = a.mT / norms.clamp(min=torch.finfo(a.dtype).tiny)[..., None, None]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z
