"""Mamba as the equations of the paper."""

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import DIM, N, fill, seeded


@pytest.mark.parametrize("spec", ["mamba(state_dim=5, dt_rank=3)", "mamba(expand=3, state_dim=2, conv=3)"])
def test_is_the_recurrence_of_the_paper(spec):
    module, x = seeded(spec)
    fill(module, skip=torch.linspace(-1, 2, module.expand * DIM))
    width, rank = module.conv, module.widths[0]
    u = F.pad(module.input(x).mT, (width - 1, 0))
    u = F.silu(F.conv1d(u, module.mix.weight[:, None], module.shift, groups=u.shape[1]).mT)
    r, b, c = module.select(u).split([rank, module.state_dim, module.state_dim], -1)
    dt = F.softplus(module.dt(r) + module.dt_bias)
    a, h, y = -module.a_log.exp(), torch.zeros(len(x), module.expand * DIM, module.state_dim, dtype=x.dtype), []
    for t in range(N):
        h = torch.exp(dt[:, t, :, None] * a) * h + dt[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
        y.append((h * c[:, t, None]).sum(-1) + module.skip * u[:, t])
    expected = module.out(torch.stack(y, 1) * F.silu(module.gate(x)))
    torch.testing.assert_close(module(x)[0], expected)


def test_initialization():
    module = longspan.build("mamba", 72, 2)
    dt = F.softplus(module.dt_bias)
    assert module.dt.weight.shape == (144, 5)  # 72 / 16, rounded up
    assert module.a_log.exp().round().equal(torch.arange(1.0, 17.0).expand(144, 16))
    assert 1e-3 <= dt.min() < 2e-3
    assert 0.05 < dt.max() <= 0.1
    assert module.dt.weight.abs().max() <= 5**-0.5
    assert module.skip.eq(1).all()
    assert "a_log" in module.no_decay


def test_heads_have_no_effect():
    (one, x), (two, _) = seeded("mamba", DIM, 1), seeded("mamba", DIM, 4)
    assert one(x)[0].equal(two(x)[0])
