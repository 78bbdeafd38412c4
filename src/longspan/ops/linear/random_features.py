"""Random features: maps through random rows w, whose inner products are a kernel on average."""

import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._utils.model_memory import check_fits_in_memory
from ..._utils.spec import known

MOST = 1_000_000
ROWS = {
    "orthogonal": "blocks of D rows at right angles, each row uniform on the sphere: less variance, but more of cos "
    "and sin features where tokens are far apart (D = 4: where |q-k|^2/2 is beyond 4.75)",
    "iid": "each row on its own",
}
RADII = {
    "chi": "of a Gaussian in D dimensions, independent of the direction: unbiased",
    "sqrt": "sqrt(D) for all: less variance, biased low",
    "quantiles": "at the levels i / (m + 1) of chi, in random order: biased low, as the upper tail is cut",
    "midpoints": "at the levels (i - 1/2) / m of chi, in random order: biased less",
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
    """The rows of one head: (features, dim) float64, a function of these arguments and of nothing else.

    ``step`` counts redraws. With the defaults each row is N(0, I). ``rows`` is a name in ``ROWS``, ``radii`` in
    ``RADII``. Raises ValueError for an unknown name and for sizes below one.
    """
    # Hashed, because seed + layer + head would give one seed's second head the rows of the next seed's first.
    key = hashlib.sha256(f"{seed} {layer} {head} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
    return sample(1, features, dim, rows=rows, radii=radii, generator=generator)[0]


def projections(heads: int, features: int, dim: int, **options: Any) -> Tensor:
    """Those of all heads: (heads, features, dim) float64. ``options`` as in ``projection``."""
    return torch.stack([projection(features, dim, head=head, **options) for head in range(heads)])


def enough(dim: int) -> int:
    """D log D rounded up, at least D: rows for heads of D channels (Choromanski et al. 2020, theorem 4)."""
    return max(dim, math.ceil(dim * math.log(dim)))


def sample(count: int, features: int, dim: int, *, rows: str, radii: str, generator: torch.Generator) -> Tensor:
    """``count`` independent projections at once: (count, features, dim) float64 on the CPU; see ``projection``.

    Orthogonal rows come in blocks of D, the last with what is left; rows of different blocks are independent.

    Source: Choromanski et al. 2020 (2009.14794), section 2.4; radii by levels: Su 2020 (kexue.fm/archives/7921). The
    published code leaves out the sign of ``haar`` and is biased for it.
    """
    known(rows, ROWS, "rows")
    known(radii, RADII, "radii")
    if min(features, dim) < 1:
        raise ValueError(f"features={features} rows of dim={dim} channels: both must be at least 1")
    if features > MOST:
        raise ValueError(f"features={features} rows are more than anything needs; at most {MOST}")
    # The directions, and what they are made of.
    check_fits_in_memory(3 * 8 * count * features * dim, f"features={features} random rows of {dim} channels")
    kind = {"dtype": torch.float64, "device": "cpu"}
    if rows == "iid":
        directions = F.normalize(torch.randn(count, features, dim, generator=generator, **kind), dim=-1)
    else:
        squares = torch.randn(count, -(-features // dim), dim, dim, generator=generator, **kind)
        directions = haar(squares).flatten(1, 2)[:, :features]
    if radii == "chi":
        # From numbers of their own: the norm of the block that made a direction depends on it.
        lengths = torch.randn(count, features, dim, generator=generator, **kind).norm(dim=-1)
    elif radii == "sqrt":
        lengths = torch.full((count, features), dim**0.5, **kind)
    else:
        order = torch.rand(count, features, generator=generator, **kind).argsort(-1)
        lengths = levels(features, dim, radii)[order]
    return directions * lengths[..., None]


def haar(gaussian: Tensor) -> Tensor:
    """Square matrices of independent N(0, 1) -> orthogonal ones, uniform over all rotations and reflections.

    (..., D, D) -> (..., D, D). QR alone is not uniform: its routine fixes the signs of R by those of the columns, so
    that the first entry of Q is never positive. Multiplied by the signs of R it is the Gram-Schmidt process.
    """
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]).mT


def levels(features: int, dim: int, radii: str) -> Tensor:
    """The lengths of ``quantiles`` or ``midpoints``, ascending: (features,) float64."""
    ranks = torch.arange(1, features + 1, dtype=torch.float64, device="cpu")
    return chi_quantile(ranks / (features + 1) if radii == "quantiles" else (ranks - 0.5) / features, dim)


def chi_quantile(p: Tensor, dim: int) -> Tensor:
    """The length that a Gaussian in ``dim`` dimensions stays below with probability p, for p in (0, 1): float64.

    By bisection, as the distribution function is P(D/2, R^2/2), the regularized lower incomplete gamma function.
    """
    p = p.double()
    # Beyond sqrt(D) + 9 lies less than float64 resolves.
    low, high = torch.zeros_like(p), torch.full_like(p, dim**0.5 + 9)
    half = torch.full_like(p, dim / 2)
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, middle.square() / 2) < p
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


class Parts(NamedTuple):
    """Features factor * e^exponent, kept apart so that exponents can be shifted before they overflow."""

    exponent: Tensor | None  # (..., N, F), or (..., N, 1) where the features of a token share it; None: 0
    factor: Tensor | float  # (..., N, F)

    def peak(self) -> Tensor:
        """The largest exponent of each token (..., N), without a gradient."""
        assert self.exponent is not None
        return self.exponent.detach().amax(-1)

    def features(self, shift: Tensor | None = None) -> Tensor:
        """(..., N, F): the features, divided by e^shift where a shift (..., N) is given."""
        if self.exponent is None:
            assert isinstance(self.factor, Tensor)
            return self.factor
        exponent = self.exponent if shift is None else self.exponent - shift[..., None]
        return exponent.exp() * self.factor


def positive(x: Tensor, w: Tensor) -> Parts:
    """m^(-1/2) e^(w.x - |x|^2/2): e^(q.k) on average, never negative; accurate where it is small.

    x (..., N, D), w (..., m, D) -> m features. Source: Choromanski et al. 2020, lemma 1.
    """
    return Parts(x @ w.mT - _half_square(x), w.shape[-2] ** -0.5)


def hyperbolic(x: Tensor, w: Tensor) -> Parts:
    """(2m)^(-1/2) e^(+-w.x - |x|^2/2): e^(q.k) on average, each row used in both directions, which lowers variance.

    x (..., N, D), w (..., m, D) -> 2m features. Source: Choromanski et al. 2020, lemma 1, SM^hyp+.
    """
    products = x @ w.mT
    return Parts(torch.cat([products, -products], -1) - _half_square(x), (2 * w.shape[-2]) ** -0.5)


def trigonometric(x: Tensor, w: Tensor) -> Parts:
    """m^(-1/2) e^(|x|^2/2) [cos w.x, sin w.x]: e^(q.k) on average, but single estimates may be negative.

    x (..., N, D), w (..., m, D) -> 2m features. Source: Choromanski et al. 2020, eq. 5.
    """
    return Parts(_half_square(x), fourier(x, w).factor)


def fourier(x: Tensor, w: Tensor) -> Parts:
    """m^(-1/2) [cos w.x, sin w.x]: e^(-|q-k|^2/2) on average, exactly 1 for q = k; estimates may be negative.

    x (..., N, D), w (..., m, D) -> 2m features. Source: Rahimi and Recht 2007, "Random Features for Large-Scale Kernel
    Machines", algorithm 1.
    """
    angles = x @ w.mT
    return Parts(None, torch.cat([angles.cos(), angles.sin()], -1) * w.shape[-2] ** -0.5)


def generalized(x: Tensor, w: Tensor, function: Callable[[Tensor], Tensor] = F.relu, floor: float = 0.0) -> Parts:
    """m^(-1/2) (f(w.x) + floor): the kernel E f(w.q) f(w.k), whatever that is.

    For relu without a floor it is the arc-cosine kernel |q| |k| (sin t + (pi - t) cos t) / (2 pi), t the angle.
    x (..., N, D), w (..., m, D) -> m features.

    Source: Choromanski et al. 2020, section 2.2; Cho and Saul 2009, "Kernel Methods for Deep Learning", eq. 6.
    """
    return Parts(None, (function(x @ w.mT) + floor) * w.shape[-2] ** -0.5)


def exponential(x: Tensor, w: Tensor) -> Parts:
    """m^(-1/2) e^(w.x): e^(|q+k|^2/2) on average, that is e^(q.k) with a weight e^(|k|^2/2) for each key.

    x (..., N, D), w (..., m, D) -> m features. The generalized features for f = exp, apart from overflow.
    """
    return Parts(x @ w.mT, w.shape[-2] ** -0.5)


def estimate(
    q: Tensor, k: Tensor, w: Tensor, features: Callable[[Tensor, Tensor], Parts], clip: bool = False
) -> Tensor:
    """phi(q).phi(k) for all pairs: q (..., N, D), k (..., M, D), w (..., m, D) -> (..., N, M). O(N M) memory.

    ``clip``: negative estimates become 0. That is never further from a positive kernel, but no longer unbiased: on
    average it adds what was cut off.
    """
    products = features(q, w).features() @ features(k, w).features().mT
    return products.clamp(min=0.0) if clip else products


def variance(q: Tensor, k: Tensor, name: str) -> Tensor:
    """Of one row's estimate of e^(q.k), w ~ N(0, I): q, k (..., D) -> (...). With m independent rows, 1/m of it.

    ``name``: positive, hyperbolic or trigonometric. Source: Choromanski et al. 2020, lemma 2, for m = 1.
    """
    exact, far, near = (q * k).sum(-1).exp(), (q + k).square().sum(-1), (q - k).square().sum(-1)
    formulas = {
        "positive": lambda: exact.square() * far.expm1(),
        # Of the mean over both directions of a row.
        "hyperbolic": lambda: exact.square() * far.expm1() * -(-far).expm1() / 2,
        "trigonometric": lambda: far.exp() / exact.square() * (-near).expm1().square() / 2,
    }
    return formulas[known(name, formulas, "estimator of e^(q.k)")]()


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2
