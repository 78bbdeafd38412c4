"""State-space duality as the paper's equations over all pairs."""

import pytest
import torch
import torch.nn.functional as F

from support.mechanisms import N, fill, seeded


@pytest.mark.parametrize(("key_heads", "heads"), [(1, 2), (2, 4)])
def test_is_the_semiseparable_matrix(key_heads, heads):
    """Y = (L * C B^T) (dt X) + D X with L_ij = exp(sum of dt A over i, ..., j + 1), and the rest of the block."""
    module, u = seeded(f"ssd(channels=5, key_heads={key_heads})", 8, heads)
    scale = torch.linspace(0.5, 1.5, 16, dtype=torch.float64)
    fill(module, scale=scale, skip=torch.linspace(-1, 2, heads))
    mixed = torch.cat([module.value(u), module.key(u), module.query(u)], -1).mT
    mixed = F.conv1d(F.pad(mixed, (3, 0)), module.mix.weight[:, None], module.shift, groups=mixed.shape[1]).mT
    x, b, c = F.silu(mixed).split([16, 5 * key_heads, 5 * key_heads], -1)
    x = x.unflatten(-1, (heads, -1))
    b, c = (t.unflatten(-1, (key_heads, -1)).repeat_interleave(heads // key_heads, 2) for t in (b, c))
    dt = F.softplus(module.dt(u) + module.dt_bias)
    y = torch.zeros_like(x)
    for i in range(N):
        for j in range(i + 1):
            decay = (-module.a_log.exp() * dt[:, j + 1 : i + 1].sum(1)).exp()
            y[:, i] += ((c[:, i] * b[:, j]).sum(-1) * decay * dt[:, j])[..., None] * x[:, j]
    y = (y + module.skip[:, None] * x).flatten(-2) * F.silu(module.out_gate(u))
    y = F.rms_norm(y.unflatten(-1, (key_heads, -1)), (16 // key_heads,), None, 1e-5).flatten(-2)
    torch.testing.assert_close(module(u)[0], module.out(y * scale))


def test_initialization():
    module, _ = seeded("ssd", 64, 64, seed=1)
    a, dt = module.a_log.exp(), F.softplus(module.dt_bias)
    assert (module.channels, module.key_heads, module.value.out_features) == (128, 1, 128)
    assert 1 <= a.min() < 2
    assert 15 < a.max() <= 16
    assert 1e-3 <= dt.min() < 2e-3
    assert 0.05 < dt.max() <= 0.1
    assert module.skip.eq(1).all()
