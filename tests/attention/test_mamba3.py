"""Mamba-3 as its recurrence token by token."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import DIM, B, N, fill, seeded, three_terms


def recurrence(module, x):
    """``three_terms`` of what the weights make of x."""
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
def test_is_the_recurrence_with_all_gradients(spec, heads):
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


def test_initialization():
    module = longspan.build("mamba3", 64, 64)
    dt = F.softplus(module.dt_bias)
    assert (module.channels, module.angles, module.value.out_features) == (128, 32, 128)
    assert 1e-3 <= dt.min() < 2e-3
    assert 0.05 < dt.max() <= 0.1
    assert module.key_bias.eq(1).all()
    assert module.query_bias.eq(1).all()
