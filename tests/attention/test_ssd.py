"""State-space duality as the paper's equations over all pairs."""

import pytest
import torch
import torch.nn.functional as F

from support.mechanisms import fill, seeded, state_space


@pytest.mark.parametrize(("key_heads", "heads"), [(1, 2), (2, 4)])
def test_is_the_semiseparable_matrix(key_heads, heads):
    """Y = (L * C B^T) (dt X) + D X with L_ij = exp(sum of dt A over i, ..., j + 1), and the rest of the block."""
    module, u = seeded(f"ssd(channels=5, key_heads={key_heads})", 8, heads)
    fill(module, scale=torch.linspace(0.5, 1.5, 16), skip=torch.linspace(-1, 2, heads))
    torch.testing.assert_close(module(u)[0], state_space(module, u))


def test_initialization():
    module, _ = seeded("ssd", 64, 64, seed=1)
    a, dt = module.a_log.exp(), F.softplus(module.dt_bias)
    assert (module.channels, module.key_heads, module.value.out_features) == (128, 1, 128)
    assert 1 <= a.min() < 2
    assert 15 < a.max() <= 16
    assert 1e-3 <= dt.min() < 2e-3
    assert 0.05 < dt.max() <= 0.1
    assert module.skip.eq(1).all()
