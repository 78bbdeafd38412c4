"""Any similarity as a mean of waves: the general construction of which random Fourier features are one case.

A similarity is damped, so that it has a Fourier transform F, and written as the inverse transform:

    beta(q) gamma(k) sim(q, k) = (2 pi)^-2D int F(u, v) cos(u.q + v.k) du dv      for F even in (u, v)

With pairs (u, v) drawn from a density p, and weights c = (2 pi)^-2D F(u, v) / p(u, v), which may be negative, that is

    sim(q, k) = E[c cos(u.q + v.k)] / (beta(q) gamma(k)) = E[phi_q(q) . phi_k(k)]
    phi_q(q) = c [cos u.q, sin u.q] / beta(q),   phi_k(k) = [cos v.k, -sin v.k] / gamma(k)

Two sets of frequencies cost variance, and single estimates may be negative.

Source: Su 2020 (kexue.fm/archives/7921), "derivation", with the factor (2 pi)^-D for each of the two transforms.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Damping = Callable[[Tensor], Tensor]


def query_features(q: Tensor, u: Tensor, damping: Damping, weights: Tensor | None = None) -> Tensor:
    """phi_q: q (..., N, D), u (..., m, D), weights c (..., m) or None for 1 -> (..., N, 2m).

    ``damping`` is log beta, (..., N, D) -> (..., N).
    """
    angles = q @ u.mT
    waves = torch.cat([angles.cos(), angles.sin()], -1)
    if weights is not None:
        waves = waves * torch.cat([weights, weights], -1)[..., None, :]
    return waves * (-damping(q)).exp()[..., None] * u.shape[-2] ** -0.5


def key_features(k: Tensor, v: Tensor, damping: Damping) -> Tensor:
    """phi_k: k (..., M, D), v (..., m, D) -> (..., M, 2m). ``damping`` is log gamma, (..., M, D) -> (..., M)."""
    angles = k @ v.mT
    waves = torch.cat([angles.cos(), -angles.sin()], -1)
    return waves * (-damping(k)).exp()[..., None] * v.shape[-2] ** -0.5


def gaussian_damping(strength: float) -> Damping:
    """log e^(-strength |x|^2): (..., D) -> (...)."""
    return lambda x: -strength * x.square().sum(-1)


def exponential_frequencies(normal: Tensor, other: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """The pairs (u, v) for sim = e^(q.k) with beta = gamma = e^(-strength |x|^2), all of weight 1.

    Its transform is a Gaussian of mass one: each channel of (u, v) is N(0, [[2 s, -1], [-1, 2 s]]), s the strength.
    ``normal`` and ``other`` (..., m, D) are independent N(0, 1) -> u, v (..., m, D). At s = 1/2 v = -u, and what comes
    out are the trigonometric features of ``random_features``; a larger s has more variance.

    Raises ValueError for a strength below 1/2, for which there is no transform.
    """
    if strength < 0.5:
        raise ValueError(
            f"strength={strength} damps e^(q.k) too little for a Fourier transform; it must be at least 0.5"
        )
    root = (2 * strength) ** 0.5
    return root * normal, -normal / root + (2 * strength - 1 / (2 * strength)) ** 0.5 * other
