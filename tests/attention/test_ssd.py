"""State-space duality as the paper's equations over all pairs; where its decays start, and those of its kin."""

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


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [("gated_deltanet", 0, 16), ("kda", 1, 16), ("kda(lower_bound=-5.0)", 1, 1), ("ssd", 1, 16)],
)
def test_decays_start_where_the_papers_put_them(spec, low, high):
    module, _ = seeded(spec, 512, 128)
    rate, step = module.a_log.exp(), F.softplus(module.dt_bias)
    assert low <= rate.min() < low + 1
    assert rate.max() <= high + 1e-5
    assert rate.mean().item() == pytest.approx((low + high) / 2, rel=0.15)
    assert 0.999e-3 <= step.min() <= step.max() <= 0.1001
    assert step.log10().mean().item() == pytest.approx(-2, abs=0.15)
    assert module.a_log.isfinite().all()


def test_sizes_and_skip_follow_the_paper():
    module, _ = seeded("ssd", 64, 64)
    assert (module.channels, module.key_heads, module.value.out_features) == (128, 1, 128)
    assert module.skip.eq(1).all()
