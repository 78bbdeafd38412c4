"""Random features are kernels on average: by exact quadrature, by sampling, and by series without either."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longspan.attention import build
from longspan.attention.linear import Linear
from longspan.ops.linear import features, polynomial
from longspan.ops.linear import random_features as rf
from support.tensors import data as gaussian

SOFTMAX = {"positive": rf.positive, "hyperbolic": rf.hyperbolic, "trigonometric": rf.trigonometric}
D, DRAWS = 4, 20_000
# Where rows that are not uniform on the sphere show: random directions average the bias away.
ADVERSARIAL = torch.cat([torch.full((1, D), D**-0.5), torch.eye(D)[:1]]).double()
ADVERSARIAL = torch.cat([ADVERSARIAL, -ADVERSARIAL])


def rows(kind, radii="chi", count=DRAWS, features=D, dim=D):
    return rf.sample(count, features, dim, rows=kind, radii=radii, generator=torch.Generator().manual_seed(1))


def nodes(dim, points=80):
    """Points w (points^dim, 1, dim) and probabilities that integrate smooth functions of N(0, I) exactly."""
    at, weights = np.polynomial.hermite_e.hermegauss(points)
    at, weights = torch.from_numpy(at), torch.from_numpy(weights / weights.sum())
    return torch.cartesian_prod(*[at] * dim).view(-1, 1, dim), torch.cartesian_prod(*[weights] * dim).view(
        -1, dim
    ).prod(1)


def off_by(name, w):
    """How many standard errors the mean estimate of e^(q.k) is away from it, for each adversarial direction."""
    q, k = 0.8 * ADVERSARIAL[:, None], 0.4 * ADVERSARIAL[:, None]  # trig features look at q - k, the others at q + k
    if name == "trigonometric":
        k = -k
    found = rf.estimate(q, k, w[:, None], SOFTMAX[name])[..., 0, 0]  # (draws, directions)
    exact = (q * k).sum(-1).exp()[:, 0]
    return (found.mean(0) - exact) / (found.std(0) / len(w) ** 0.5)


@pytest.mark.parametrize("kind", rf.ROWS)
@pytest.mark.parametrize("name", SOFTMAX)
def test_estimates_are_unbiased_in_adversarial_directions(name, kind):
    assert off_by(name, rows(kind)).abs().max() < 4


@pytest.mark.parametrize("name", SOFTMAX)
def test_mean_and_variance_are_those_of_the_formulas(name):
    """One row, integrated over its distribution without sampling."""
    w, p = nodes(2)
    q, k = torch.tensor([[0.3, -0.5]]).double(), torch.tensor([[0.6, 0.2]]).double()
    found = rf.estimate(q, k, w, SOFTMAX[name])[:, 0, 0]
    mean = (p * found).sum()
    torch.testing.assert_close(mean, (q * k).sum().exp(), rtol=1e-12, atol=0)
    variance = (p * (found - mean).square()).sum()
    torch.testing.assert_close(variance, rf.variance(q, k, name)[0], rtol=1e-10, atol=0)


def test_hyperbolic_features_beat_twice_as_many_positive_ones():
    q, k = gaussian(50, D), gaussian(50, D, seed=1)
    assert (rf.variance(q, k, "hyperbolic") < rf.variance(q, k, "positive") / 2).all()
    with pytest.raises(ValueError, match="unknown estimator of e.*'exp'; known: hyperbolic, positive, trigonometric"):
        rf.variance(q, k, "exp")


def test_orthogonal_rows_have_less_variance():
    q, k = 0.7 * ADVERSARIAL[:, None], 0.5 * ADVERSARIAL[:, None]
    for function in SOFTMAX.values():
        iid, orthogonal = (rf.estimate(q, k, rows(kind)[:, None], function).var(0) for kind in ("iid", "orthogonal"))
        assert (orthogonal < iid).all()


def test_fourier_features_are_the_rbf_kernel():
    w, p = nodes(2)
    q, k = torch.tensor([[0.3, -0.5]]).double(), torch.tensor([[0.6, 0.2]]).double()
    expected = (-(q - k).square().sum() / 2).exp()
    torch.testing.assert_close((p * rf.estimate(q, k, w, rf.fourier)[:, 0, 0]).sum(), expected)
    # One row's variance, (1 - e^(-|q-k|^2))^2 / 2.
    square = (p * rf.estimate(q, k, w, rf.fourier)[:, 0, 0].square()).sum()
    torch.testing.assert_close(square - expected**2, (1 - expected**2).square() / 2)
    torch.testing.assert_close(rf.estimate(q, q, w, rf.fourier), torch.ones(len(w), 1, 1).double())


def test_relu_features_are_the_arc_cosine_kernel():
    """In the plane: the angle on a fine grid, and the mean of the squared radius, 2."""
    angles = torch.arange(4096, dtype=torch.float64) * (2 * math.pi / 4096)
    w = 2**0.5 * torch.stack([angles.cos(), angles.sin()], -1)
    q, k = torch.tensor([[0.3, -0.5]]).double(), torch.tensor([[0.6, 0.2]]).double()
    t = torch.acos(F.cosine_similarity(q, k))
    expected = q.norm() * k.norm() * (t.sin() + (math.pi - t) * t.cos()) / (2 * math.pi)
    torch.testing.assert_close(rf.estimate(q, k, w, rf.generalized)[0], expected, rtol=1e-5, atol=0)


def test_exponential_features_weigh_keys_by_their_norm():
    w, p = nodes(2)
    q, k = torch.tensor([[0.3, -0.5]]).double(), torch.tensor([[0.6, 0.2]]).double()
    expected = ((q + k).square().sum() / 2).exp()
    torch.testing.assert_close((p * rf.estimate(q, k, w, rf.exponential)[:, 0, 0]).sum(), expected)


def test_clipping_biases_upwards_by_what_it_cuts_off():
    """q and k far apart, where e^(q.k) = 0.105 is small: with 16 rows, a quarter of the estimates are negative."""
    q, k = 1.5 * ADVERSARIAL[:1], -1.5 * ADVERSARIAL[:1]
    w, exact = rows("iid", features=16), (q * k).sum().exp()
    plain, clipped = (rf.estimate(q, k, w, rf.trigonometric, clip)[:, 0, 0] for clip in (False, True))
    assert 0.2 < (plain < 0).double().mean() < 0.5
    assert ((clipped - exact).abs() <= (plain - exact).abs()).all()
    assert abs(plain.mean() - exact) < 4 * plain.std() / DRAWS**0.5
    assert clipped.mean() > 2 * exact
    torch.testing.assert_close(clipped.mean() - plain.mean(), -plain.clamp(max=0).mean())


class TestRows:
    def test_blocks_are_orthogonal_and_radii_are_kept_apart(self):
        for radii in rf.RADII:
            w = rf.projection(3 * D + 2, D, radii=radii, seed=5)
            for block in w.split(D):
                products = block @ block.mT
                torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-10)
            assert (w[:D] @ w[D : 2 * D].mT).abs().min() > 1e-6

    def test_no_entry_of_a_rotation_has_a_sign(self):
        q = rf.haar(gaussian(DRAWS, D, D))
        assert (q.mean(0).abs() < 4.5 * (1 / D / DRAWS) ** 0.5).all()
        assert (torch.linalg.qr(gaussian(DRAWS, D, D)).Q[:, 0, 0] < 0).all()  # what the fix is for

    def test_gaussian_radii_make_gaussian_rows(self):
        for kind in rf.ROWS:
            w = rows(kind)
            assert abs(w.square().sum(-1).mean() - D) < 0.05
            # E x^4 = 3 for a Gaussian, 3 D / (D + 2) = 2 for rows of length sqrt D.
            assert abs(w.pow(4).mean() - 3) < 0.1

    def test_radii_by_level_are_every_level_once(self):
        for radii in ("quantiles", "midpoints"):
            w = rf.projection(11, D, radii=radii)
            torch.testing.assert_close(w.norm(dim=-1).sort().values, rf.levels(11, D, radii))
            assert not torch.equal(w.norm(dim=-1).argsort(), torch.arange(11))
        torch.testing.assert_close(rf.projection(11, D, radii="sqrt").norm(dim=-1), torch.full((11,), 2.0).double())

    def test_quantiles_invert_the_distribution(self):
        p = torch.tensor([1e-6, 0.1, 0.5, 0.9, 1 - 1e-9], dtype=torch.float64)
        torch.testing.assert_close(rf.chi_quantile(p, 2), (-2 * torch.log1p(-p)).sqrt(), rtol=1e-8, atol=0)
        torch.testing.assert_close(
            torch.special.gammainc(torch.tensor(32.0).double(), rf.chi_quantile(p, 64) ** 2 / 2), p
        )

    def test_a_projection_is_a_function_of_its_arguments(self):
        before = torch.get_rng_state()
        first = rf.projection(5, 3)
        others = [rf.projection(5, 3, seed=1), rf.projection(5, 3, layer=1), rf.projection(5, 3, head=1)]
        others.append(rf.projection(5, 3, step=1))
        assert torch.equal(rf.projection(5, 3), first)
        assert len({w.sum().item() for w in (first, *others)}) == 5
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(rf.projections(3, 5, 3, seed=2)[1], rf.projection(5, 3, seed=2, head=1))

    def test_sizes_by_default(self):
        assert [rf.enough(dim) for dim in (1, 2, 4, 64)] == [1, 2, 6, 267]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rows": "random"}, "unknown rows 'random'; known: iid, orthogonal"),
            ({"radii": "one"}, "unknown radii 'one'; known: chi, midpoints, quantiles, sqrt"),
            ({"features": 0}, "features=0 and dim=3"),
        ],
    )
    def test_bad_arguments_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            rf.projection(**{"features": 2, "dim": 3, **options})


def ratio(radii, dim, z):
    """E[estimate] / e^(q.k) of positive features with rows of these lengths and uniform directions, |q + k| = z.

    The mean of e^(r u.z) over the sphere is 0F1(; D/2; r^2 z^2 / 4), summed here as its series.
    """
    argument, term, total = radii.square() * z**2 / 4, torch.ones_like(radii), torch.ones_like(radii)
    for i in range(200):
        term = term * argument / ((dim / 2 + i) * (i + 1))
        total = total + term
    return total.mean().item() / math.exp(z**2 / 2)


# D, |q + k|, and the ratio for i / (m + 1) with m = D, 4 D, 16 D, for midpoints with m = 4 D, and for sqrt D.
RATIOS = [
    (16, 1, (0.9904, 0.9962, 0.9987, 0.9992, 0.9871)),
    (16, 2, (0.9213, 0.9648, 0.9858, 0.9900, 0.8371)),
    (16, 3, (0.713, 0.841, 0.920, 0.931, 0.479)),
    (64, 1, (0.9990, 0.9997, 0.9999, 1.0000, 0.9963)),
    (64, 2, (0.9909, 0.9967, 0.9989, 0.9994, 0.945)),
    (64, 3, (0.958, 0.983, 0.994, 0.996, 0.769)),
    (64, 4, (0.862, 0.933, 0.970, 0.977, 0.471)),
]


@pytest.mark.parametrize(("dim", "z", "expected"), RATIOS)
def test_radii_by_level_are_biased_low_by_the_series(dim, z, expected):
    levels = [rf.levels(m * dim, dim, "quantiles") for m in (1, 4, 16)] + [rf.levels(4 * dim, dim, "midpoints")]
    found = [ratio(radii, dim, z) for radii in (*levels, torch.full((1,), dim**0.5).double())]
    assert found == pytest.approx(expected, abs=1e-3)


class TestDPFP:
    def test_by_hand(self):
        """r = relu([1, -2, -1, 2]) = [1, 0, 0, 2]; its neighbors on the ring are 2 * 1, those at distance two 0."""
        x = torch.tensor([1.0, -2.0])
        assert features.dpfp(x).tolist() == [0, 0, 0, 2]
        assert features.dpfp(torch.tensor([1.0, 3.0]), 3).tolist() == [3, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0]

    def test_shapes_and_refusals(self):
        assert features.dpfp(torch.randn(2, 3, 5), 2).shape == (2, 3, 20)
        for nu in (0, 10):
            with pytest.raises(ValueError, match=f"nu={nu} pairs each of 10 numbers with .* in 1 ... 9"):
                features.dpfp(torch.ones(5), nu)

    def test_sums_are_normalized_and_zeros_stay_zeros(self):
        x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        torch.testing.assert_close(features.sum_normalize(x).abs().sum(-1), torch.ones(3).double())
        zero = torch.zeros(2, 3, requires_grad=True)
        y = features.sum_normalize(features.dpfp(zero, 2))
        y.sum().backward()
        assert not y.any()
        assert zero.grad is not None
        assert zero.grad.isfinite().all()

    def test_softmax_features_sum_to_one(self):
        torch.testing.assert_close(features.softmax(torch.randn(3, 5)).sum(-1), torch.ones(3))

    def test_both_serve_linear_attention(self):
        x = gaussian(2, 7, 8)
        for phi in (features.softmax, features.dpfp, lambda x: features.sum_normalize(features.dpfp(x, 2))):
            module = Linear(8, 2, feature_map=phi).double()
            y, state = module(x[:, :5], module.init_state(2))
            torch.testing.assert_close(torch.cat([y, module(x[:, 5:], state)[0]], 1), module(x)[0])


class TestPolynomial:
    @pytest.mark.parametrize("dim", [1, 2, 3, 4, 7, 8])
    @pytest.mark.parametrize(("constant", "taylor"), [(0.0, False), (0.7, False), (1.0, True)])
    def test_features_are_the_similarity_each_pair_once(self, dim, constant, taylor):
        q, k = gaussian(5, dim), gaussian(6, dim, seed=1)
        kernel = polynomial.polynomial(dim, constant, taylor, 0.0)
        phi = [kernel.features(x) for x in (q, k)]
        s = q @ k.mT
        expected = 1 + s + s**2 / 2 if taylor else (s + constant) ** 2
        assert phi[0].shape == (5, (dim + 1) * (dim + 2) // 2)
        torch.testing.assert_close(phi[0] @ phi[1].mT, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(kernel.similarity(q, k), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("performer", {"rows": "iid", "radii": "quantiles"}),
        ("fourier", {"rows": "iid", "radii": "quantiles"}),
        ("rfa", {"rows": "orthogonal"}),
    ],
)
def test_a_layers_rows_are_those_of_all_its_options(name, options):
    chosen = ", ".join(f"{option}={value!r}" for option, value in options.items())
    for spec, given in ((f"{name}(features=7, seed=3, {chosen})", options | {"seed": 3}), (f"{name}(features=7)", {})):
        module = build(spec, 2 * D, 2, layer=5)
        defaults = {option: getattr(module, option) for option in options}
        for step in (0, 2):
            module.redraw(step)
            expected = rf.projections(2, 7, D, **defaults | given, layer=5, step=step)
            assert torch.equal(module.projection, expected.float())
