"""Random features: maps by random rows w, whose inner products are a kernel in expectation."""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._utils.model_memory import check_fits_in_memory
from ..._utils.spec import known

MOST = 1_000_000
ROWS = {
    "orthogonal": "blocks of D orthogonal rows, each row uniform on the sphere: lower variance, but higher variance of "
    "cos and sin features for distant tokens (D = 4: |q-k|^2/2 beyond 4.75)",
    "iid": "independent rows",
}
RADII = {
    "chi": "the norm of a Gaussian in D dimensions, independent of the direction: unbiased",
    "sqrt": "sqrt(D) for all rows: lower variance, biased low",
    "quantiles": "the quantiles i / (m + 1) of chi, in random order: biased low, since the upper tail is cut",
    "midpoints": "the quantiles (i - 1/2) / m of chi, in random order: less biased",
}


def projection(
    features: int,
    dim: int,
    *,
    rows: str = "orthogonal",
    radii: str = "chi",
    seed: int = 0,
    layer: int = 0,
    head: int = 0,
    step: int = 0,
) -> Tensor:
    """Return the random rows of one head, which depend on these arguments only.

    Args:
        features: The number of rows.
        dim: Channels of a head.
        rows: A name in ``ROWS``.
        radii: A name in ``RADII``. With the defaults each row is N(0, I).
        seed: The seed of the model.
        layer: The number of the layer.
        head: The number of the head.
        step: The number of redraws.

    Returns:
        (features, dim) float64.

    Raises:
        ValueError: a name is unknown, or a size is below 1.
    """
    # Hashed, since with seed + layer + head the second head of a seed would equal the first head of the next seed.
    key = hashlib.sha256(f"{seed} {layer} {head} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
    return sample(1, features, dim, rows=rows, radii=radii, generator=generator)[0]


def projections(heads: int, features: int, dim: int, **options: Any) -> Tensor:
    """Return the rows of all heads: (heads, features, dim) float64. ``options`` as in ``projection``."""
    return torch.stack([projection(features, dim, head=head, **options) for head in range(heads)])


def enough(dim: int) -> int:
    """Return D log D rounded up, at least D: rows for heads of D channels (Choromanski et al. 2020, theorem 4)."""
    return max(dim, math.ceil(dim * math.log(dim)))


def sample(count: int, features: int, dim: int, *, rows: str, radii: str, generator: torch.Generator) -> Tensor:
    """Sample ``count`` independent projections: (count, features, dim) float64 on the CPU; see ``projection``.

    Orthogonal rows come in blocks of D; the last block may be smaller. Rows of different blocks are independent.

    References:
        Choromanski et al. 2020 (2009.14794), section 2.4; radii by quantiles: Su 2020 (kexue.fm/archives/7921). The
        published code omits the sign of ``haar``, which makes it biased.
    """
    known(rows, ROWS, "rows")
    known(radii, RADII, "radii")
    if min(features, dim) < 1:
        raise ValueError(f"features={features} and dim={dim} must be at least 1")
    if features > MOST:
        raise ValueError(f"features={features} must be at most {MOST}")
    # The directions and the Gaussian numbers behind them.
    check_fits_in_memory(3 * 8 * count * features * dim, f"features={features} random rows of {dim} channels")
    normal = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    if rows == "iid":
        directions = F.normalize(normal(count, features, dim), dim=-1)
    else:
        squares = normal(count, -(-features // dim), dim, dim)
        directions = haar(squares).flatten(1, 2)[:, :features]
    if radii == "chi":
        # From separate numbers, since the norm of the block that gave a direction depends on it.
        lengths = normal(count, features, dim).norm(dim=-1)
    elif radii == "sqrt":
        lengths = torch.full((count, features), dim**0.5, dtype=torch.float64, device="cpu")
    else:
        order = torch.rand(count, features, generator=generator, dtype=torch.float64, device="cpu").argsort(-1)
        lengths = levels(features, dim, radii)[order]
    return directions * lengths[..., None]


def haar(gaussian: Tensor) -> Tensor:
    """Turn matrices of independent N(0, 1) into orthogonal matrices with the Haar distribution.

    (..., D, D) -> (..., D, D). Q of a QR decomposition is not uniform: the routine chooses the signs of R by those of
    the columns, so the first entry of Q is never positive. Multiplying by the signs of R gives the Gram-Schmidt
    process.
    """
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]).mT


def levels(features: int, dim: int, radii: str) -> Tensor:
    """Return the lengths of ``quantiles`` or ``midpoints``, ascending: (features,) float64."""
    ranks = torch.arange(1, features + 1, dtype=torch.float64, device="cpu")
    return chi_quantile(ranks / (features + 1) if radii == "quantiles" else (ranks - 0.5) / features, dim)


def chi_quantile(p: Tensor, dim: int) -> Tensor:
    """Return the quantiles p in (0, 1) of the norm of a Gaussian in ``dim`` dimensions: float64.

    By bisection of the distribution function P(D/2, R^2/2), the regularized lower incomplete gamma function.
    """
    p = p.double()
    # The probability beyond sqrt(D) + 9 is below the resolution of float64.
    low, high = torch.zeros_like(p), torch.full_like(p, dim**0.5 + 9)
    half = torch.full_like(p, dim / 2)
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, middle.square() / 2) < p
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


class Parts(NamedTuple):
    """Features factor * e^exponent, kept separate so that exponents can be shifted before they overflow."""

    exponent: Tensor | None  # (..., N, F), or (..., N, 1) if the features of a token share it; None: 0
    factor: Tensor | float  # (..., N, F)

    def peak(self) -> Tensor:
        """Return the largest exponent of each token (..., N), without a gradient."""
        assert self.exponent is not None
        return self.exponent.detach().amax(-1)

    def features(self, shift: Tensor | None = None) -> Tensor:
        """Return the features (..., N, F), divided by e^shift if a shift (..., N) is given."""
        if self.exponent is None:
            assert isinstance(self.factor, Tensor)
            return self.factor
        exponent = self.exponent if shift is None else self.exponent - shift[..., None]
        return exponent.exp() * self.factor


def positive(x: Tensor, w: Tensor) -> Parts:
    """Features m^(-1/2) e^(w.x - |x|^2/2): e^(q.k) in expectation, never negative, accurate for small values.

    x (..., N, D), w (..., m, D) -> m features.

    References:
        Choromanski et al. 2020, lemma 1.
    """
    return Parts(x @ w.mT - _half_square(x), w.shape[-2] ** -0.5)


def hyperbolic(x: Tensor, w: Tensor) -> Parts:
    """Features (2m)^(-1/2) e^(+-w.x - |x|^2/2): e^(q.k) in expectation; both signs of each row lower the variance.

    x (..., N, D), w (..., m, D) -> 2m features.

    References:
        Choromanski et al. 2020, lemma 1, SM^hyp+.
    """
    products = x @ w.mT
    return Parts(torch.cat([products, -products], -1) - _half_square(x), (2 * w.shape[-2]) ** -0.5)


def trigonometric(x: Tensor, w: Tensor) -> Parts:
    """Features m^(-1/2) e^(|x|^2/2) [cos w.x, sin w.x]: e^(q.k) in expectation; estimates may be negative.

    x (..., N, D), w (..., m, D) -> 2m features.

    References:
        Choromanski et al. 2020, eq. 5.
    """
    return Parts(_half_square(x), fourier(x, w).factor)


def fourier(x: Tensor, w: Tensor) -> Parts:
    """Features m^(-1/2) [cos w.x, sin w.x]: e^(-|q-k|^2/2) in expectation, 1 for q = k; estimates may be negative.

    x (..., N, D), w (..., m, D) -> 2m features.

    References:
        Rahimi and Recht 2007, "Random Features for Large-Scale Kernel Machines", algorithm 1.
    """
    angles = x @ w.mT
    return Parts(None, torch.cat([angles.cos(), angles.sin()], -1) * w.shape[-2] ** -0.5)


def generalized(x: Tensor, w: Tensor, function: Callable[[Tensor], Tensor] = F.relu, floor: float = 0.0) -> Parts:
    """Features m^(-1/2) (f(w.x) + floor), with the kernel E f(w.q) f(w.k).

    For relu without a floor this is the arc-cosine kernel |q| |k| (sin t + (pi - t) cos t) / (2 pi) of the angle t.
    x (..., N, D), w (..., m, D) -> m features.

    References:
        Choromanski et al. 2020, section 2.2; Cho and Saul 2009, "Kernel Methods for Deep Learning", eq. 6.
    """
    return Parts(None, (function(x @ w.mT) + floor) * w.shape[-2] ** -0.5)


def exponential(x: Tensor, w: Tensor) -> Parts:
    """Features m^(-1/2) e^(w.x): e^(|q+k|^2/2) in expectation, which is e^(q.k) with a weight e^(|k|^2/2) per key.

    x (..., N, D), w (..., m, D) -> m features. Like the generalized features for f = exp, but without their overflow.
    """
    return Parts(x @ w.mT, w.shape[-2] ** -0.5)


def estimate(
    q: Tensor, k: Tensor, w: Tensor, features: Callable[[Tensor, Tensor], Parts], clip: bool = False
) -> Tensor:
    """Return phi(q).phi(k) for all pairs: q (..., N, D), k (..., M, D), w (..., m, D) -> (..., N, M). O(N M) memory.

    ``clip`` replaces negative estimates by 0. This never increases the distance to a positive kernel, but it makes the
    estimates biased high.
    """
    products = features(q, w).features() @ features(k, w).features().mT
    return products.clamp(min=0.0) if clip else products


def variance(q: Tensor, k: Tensor, name: str) -> Tensor:
    """Return the variance of an estimate of e^(q.k) by one row w ~ N(0, I): q, k (..., D) -> (...).

    With m independent rows it is 1/m of that. ``name`` is positive, hyperbolic or trigonometric.

    References:
        Choromanski et al. 2020, lemma 2, for m = 1.
    """
    exact, far, near = (q * k).sum(-1).exp(), (q + k).square().sum(-1), (q - k).square().sum(-1)
    formulas = {
        "positive": lambda: exact.square() * far.expm1(),
        # The mean over both signs of a row.
        "hyperbolic": lambda: exact.square() * far.expm1() * -(-far).expm1() / 2,
        "trigonometric": lambda: far.exp() / exact.square() * (-near).expm1().square() / 2,
    }
    return formulas[known(name, formulas, "estimator of e^(q.k)")]()


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2
