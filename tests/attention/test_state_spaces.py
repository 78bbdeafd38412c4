"""Mamba, its successors and log-linear attention as the equations of their papers; where decays start."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import DIM, B, N, fill, seeded, state_space, three_terms


@pytest.mark.parametrize("spec", ["mamba(state_dim=5, dt_rank=3)", "mamba(expand=3, state_dim=2, conv=3)"])
def test_mamba_is_its_recurrence(spec):
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


def test_how_mamba_starts():
    module = longspan.build("mamba", 72, 2)
    dt = F.softplus(module.dt_bias)
    assert module.dt.weight.shape == (144, 5)  # 72 / 16, rounded up
    assert module.a_log.exp().round().equal(torch.arange(1.0, 17.0).expand(144, 16))
    assert 1e-3 <= dt.min() < 2e-3
    assert 0.05 < dt.max() <= 0.1
    assert module.dt.weight.abs().max() <= 5**-0.5
    assert module.skip.eq(1).all()
    assert "a_log" in module.no_decay


def test_heads_have_no_effect_on_mamba():
    (one, x), (two, _) = seeded("mamba", DIM, 1), seeded("mamba", DIM, 4)
    assert one(x)[0].equal(two(x)[0])


@pytest.mark.parametrize(("key_heads", "heads"), [(1, 2), (2, 4)])
def test_ssd_is_the_semiseparable_matrix(key_heads, heads):
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


def test_how_ssd_starts():
    module, _ = seeded("ssd", 64, 64)
    assert (module.channels, module.key_heads, module.value.out_features) == (128, 1, 128)
    assert module.skip.eq(1).all()


@pytest.mark.whole
@pytest.mark.parametrize(("levels", "key_heads", "heads"), [(15, 1, 2), (3, 2, 4)])
def test_log_linear_is_the_sum_over_pairs(levels, key_heads, heads):
    module, u = seeded(f"log_linear(levels={levels}, channels=5, key_heads={key_heads})", 8, heads)
    fill(module, scale=torch.linspace(0.5, 1.5, 16), skip=torch.linspace(-1, 2, heads))
    fill(module, level_scale=torch.linspace(-2, 2, heads * levels).view(heads, levels))
    weight = F.softplus(module.level(u).unflatten(-1, (heads, levels)) * module.level_scale)

    def level(i, j):
        return weight[:, i, :, min((i ^ j).bit_length(), levels - 1)]

    torch.testing.assert_close(module(u)[0], state_space(module, u, level))


def recurrence(module, x):
    """Mamba-3: ``three_terms`` of what the weights make of x."""
    heads, groups = module.heads, module.key_heads
    v = module.value(x).unflatten(-1, (heads, -1))
    dt = F.softplus(module.dt(x) + module.dt_bias)
    keep = torch.exp(-F.softplus(module.decay(x)).clamp(min=1e-4) * dt)
    blend = torch.sigmoid(module.blend(x))
    theta = (math.pi * dt[..., None] * torch.tanh(module.angle(x))[:, :, None]).cumsum(1)

    def prepared(t, scale, bias):
        t = F.rms_norm(t.unflatten(-1, (groups, -1)), (module.channels,), scale, 1e-5)
        return t.repeat_interleave(heads // groups, 2) + bias

    k = prepared(module.key(x), module.key_scale, module.key_bias)
    q = prepared(module.query(x), module.query_scale, module.query_bias)
    out = three_terms(q, k, v, theta, keep, dt, blend) + module.skip[:, None] * v
    return module.out(out.flatten(-2) * F.silu(module.out_gate(x)))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("spec", "heads"),
    [("mamba3(channels=6)", 2), ("mamba3(channels=5, key_heads=2, expand_v=1.5, rotation=0.9)", 4)],
)
def test_mamba3_is_its_recurrence_with_all_gradients(spec, heads):
    module, x = seeded(spec, 8, heads)
    fill(module, skip=torch.linspace(-1, 2, heads), key_scale=torch.linspace(0.5, 2, module.channels))
    fill(module, query_scale=torch.linspace(2, 0.5, module.channels))
    # Turns of up to half a circle per token.
    fill(module, dt_bias=0.5, angle__weight=3 * module.angle.weight)
    leaves = [x.requires_grad_(), *module.parameters()]
    weights = torch.linspace(-1, 1, B * N * DIM, dtype=torch.float64).view(B, N, DIM)
    out = [module(x)[0], recurrence(module, x)]
    torch.testing.assert_close(*out)
    grads = [torch.autograd.grad((y * weights).sum(), leaves) for y in out]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_how_mamba3_starts():
    module = longspan.build("mamba3", 64, 64)
    dt = F.softplus(module.dt_bias)
    assert (module.channels, module.angles, module.value.out_features) == (128, 32, 128)
    assert 1e-3 <= dt.min() < 2e-3
    assert 0.05 < dt.max() <= 0.1
    assert module.key_bias.eq(1).all()
    assert module.query_bias.eq(1).all()
