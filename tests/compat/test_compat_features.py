"""Feature maps of ``compat.fast_transformers``: the kernels that they estimate, and when they are drawn anew."""

import itertools
import math

import pytest
import torch

from longspan.compat.fast_transformers import feature_maps as maps
from longspan.compat.fast_transformers.feature_maps.fourier_features import orthogonal_random_matrix_

N, L, H, E = 3, 13, 2, 5


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def test_random_features_estimate_their_kernels(random):
    x, y = (torch.randn(4, E, generator=random, dtype=torch.float64) / 2 for _ in range(2))
    dots, distances, temp = (x * y).sum(-1), (x - y).square().sum(-1), E**-0.5
    kernels = {
        maps.RandomFourierFeatures: (-distances * temp / 2).exp(),
        maps.SmoothedRandomFourierFeatures: (-distances * temp / 2).exp() + 1,
        maps.Favor: (dots * temp).exp(),
    }
    torch.manual_seed(0)
    many = 40_001
    for cls, kernel in kernels.items():
        for orthogonal in (True, False):
            phi = cls(E, many, orthogonal=orthogonal).double()
            # Four standard errors of at least `many / 2` estimates, each of the order of its kernel's square root.
            estimate = (phi(x) * phi(y)).sum(-1)
            assert ((estimate - kernel).abs() < 4 * (1 + kernel) ** 2 / math.sqrt(many / 2)).all(), cls
    phi = maps.GeneralizedRandomFeatures(E, many, kernel_fn=torch.square).double()
    # E (w.x)^2 (w.y)^2 = |x|^2 |y|^2 + 2 (x.y)^2
    exact = x.square().sum(-1) * y.square().sum(-1) + 2 * dots.square()
    assert phi(x).shape == (4, many)
    torch.testing.assert_close((phi(x) * phi(y)).mean(-1), exact, rtol=0.15, atol=0)


def test_omega_is_never_zero_and_drawn_when_due():
    torch.manual_seed(1)
    phi = maps.Favor(E, 6, redraw=2)
    drawn = [phi.omega]
    for _ in range(4):
        phi.new_feature_map("cpu")
        drawn.append(phi.omega)
    assert [not torch.equal(one, two) for one, two in itertools.pairwise(drawn)] == [True, False, True, False]
    assert (drawn[0] != 0).all()
    fixed = maps.Favor(E, 6, deterministic_eval=True).eval()
    before = fixed.omega
    fixed.new_feature_map("cpu")
    assert fixed.omega is before
    # Gradients of an earlier call survive a redraw.
    x = torch.ones(2, 3, H, E, requires_grad=True)
    y = phi(x)
    phi.new_feature_map("cpu")
    y.sum().backward()


def test_orthogonal_columns_come_in_blocks():
    w = torch.zeros(E, 2 * E + 1, dtype=torch.float64)
    orthogonal_random_matrix_(w)
    for block in w.split(E, 1):
        products = block.mT @ block
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-12)
        assert (products.diagonal() > 0).all()


def test_stabilized_features_need_whole_sequences(random):
    q = torch.randn(N, L, H, E, generator=random, dtype=torch.float64)
    phi = maps.Favor(E, 6, stabilize=True).double()
    plain = maps.Favor(E, 6).double()
    plain.omega = phi.omega
    factor = (-(q * E**-0.25).square().sum(-1, keepdim=True).amax(1, keepdim=True)).exp()
    torch.testing.assert_close(phi(q), plain(q) * factor)
    with pytest.raises(ValueError, match="stabilize=False"):
        phi(q[:, 0])


def test_a_feature_map_must_be_defined():
    with pytest.raises(NotImplementedError, match="FeatureMap.*forward"):
        maps.FeatureMap(E)(torch.ones(E))
    with pytest.raises(NotImplementedError, match="FeatureMap.*new_feature_map"):
        maps.FeatureMap(E).new_feature_map("cpu")
    relu = maps.ActivationFunctionFeatureMap.factory(torch.relu)(E)
    assert relu.forward_keys(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]


def test_impossible_sizes_are_refused():
    for options in ({"redraw": 0}, {"n_dims": 1}):
        with pytest.raises(ValueError, match="redraw=.*n_dims="):
            maps.RandomFourierFeatures(E, **options)


def test_a_smoothing_constant_is_the_last_feature():
    smoothed = maps.SmoothedRandomFourierFeatures(6, n_dims=9, smoothing=0.25)
    features = smoothed(torch.randn(2, 3, 6))
    assert features.shape == (2, 3, 9)
    assert (features[..., -1] == 0.25).all()
