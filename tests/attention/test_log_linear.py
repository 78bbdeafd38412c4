"""Log-linear attention on the gates of Mamba-2 as the sum over pairs."""

import pytest
import torch
import torch.nn.functional as F

from support.mechanisms import N, fill, seeded


@pytest.mark.whole
@pytest.mark.parametrize(("levels", "key_heads", "heads"), [(15, 1, 2), (3, 2, 4)])
def test_is_the_sum_over_pairs(levels, key_heads, heads):
    module, u = seeded(f"log_linear(levels={levels}, channels=5, key_heads={key_heads})", 8, heads)
    fill(module, scale=torch.linspace(0.5, 1.5, 16), skip=torch.linspace(-1, 2, heads))
    fill(module, level_scale=torch.linspace(-2, 2, heads * levels).view(heads, levels))
    mixed = torch.cat([module.value(u), module.key(u), module.query(u)], -1).mT
    mixed = F.conv1d(F.pad(mixed, (3, 0)), module.mix.weight[:, None], module.shift, groups=mixed.shape[1]).mT
    x, b, c = F.silu(mixed).split([16, 5 * key_heads, 5 * key_heads], -1)
    x = x.unflatten(-1, (heads, -1))
    b, c = (t.unflatten(-1, (key_heads, -1)).repeat_interleave(heads // key_heads, 2) for t in (b, c))
    dt = F.softplus(module.dt(u) + module.dt_bias)
    weight = F.softplus(module.level(u).unflatten(-1, (heads, levels)) * module.level_scale)
    y = torch.zeros_like(x)
    for i in range(N):
        for j in range(i + 1):
            decay = (-module.a_log.exp() * dt[:, j + 1 : i + 1].sum(1)).exp()
            level = weight[:, i, :, min((i ^ j).bit_length(), levels - 1)]
            y[:, i] += (level * (c[:, i] * b[:, j]).sum(-1) * decay * dt[:, j])[..., None] * x[:, j]
    y = (y + module.skip[:, None] * x).flatten(-2) * F.silu(module.out_gate(u))
    y = F.rms_norm(y.unflatten(-1, (key_heads, -1)), (16 // key_heads,), None, 1e-5).flatten(-2)
    torch.testing.assert_close(module(u)[0], module.out(y * module.scale))
