"""Log-linear attention on the gates of Mamba-2: worked by hand, and as the sum over pairs."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import N, fill, seeded, tokens


def test_by_hand():
    module = longspan.build("log_linear(levels=3, channels=1, expand_v=1.0, convolution=0)", 1, 1).double()
    for part in ("query", "key", "value", "out", "out_gate"):
        fill(module, **{f"{part}__weight": 1.0})
    # dt = 1 and e^(dt A) = e^-2 for every token, D = 3; the weights of the levels are softplus(log(e^l - 1)) = l for
    # an input of 1, l = 1, 2, 3.
    fill(module, dt__weight=0.0, dt_bias=math.log(math.e - 1), a_log=math.log(2), skip=3.0)
    fill(module, level__weight=torch.tensor([[math.log(math.e**n - 1)] for n in (1, 2, 3)]))
    s, a = float(F.silu(torch.tensor(1.0, dtype=torch.float64))), math.exp(-2)
    # Pairs (t, j): (0, 0), (1, 1), (2, 2) have level 0; (1, 0) level 1; (2, 0), (2, 1) level 2.
    o = [s**3, s**3 * (1 + 2 * a), s**3 * (1 + 3 * a + 3 * a**2)]
    gated = [(n + 3 * s) * s for n in o]
    expected = tokens(*((g / math.sqrt(g * g + 1e-5),) for g in gated))
    torch.testing.assert_close(module(tokens((1,), (1,), (1,)))[0], expected)


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
