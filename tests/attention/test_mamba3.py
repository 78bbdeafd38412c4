"""Mamba-3 as its recurrence token by token."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import DIM, B, N, fill, seeded
from support.tensors import merge_heads


def recurrence(module, x):
    """The three-term recurrence, with complex numbers for the rotations."""
    heads, groups, pairs = module.heads, module.key_heads, module.angles
    v = module.value(x).unflatten(-1, (heads, -1))
    dt = F.softplus(module.dt(x) + module.dt_bias)
    keep = torch.exp(-F.softplus(module.decay(x)).clamp(min=1e-4) * dt)
    blend = torch.sigmoid(module.blend(x))
    theta = (math.pi * dt[..., None] * torch.tanh(module.angle(x))[:, :, None]).cumsum(1)

    def prepared(t, scale, bias):
        t = F.rms_norm(t.unflatten(-1, (groups, -1)), (module.channels,), scale, 1e-5)
        t = t.repeat_interleave(heads // groups, 2) + bias
        turned = torch.view_as_complex(t[..., : 2 * pairs].unflatten(-1, (pairs, 2)).contiguous())
        turned = torch.view_as_real(turned * torch.polar(torch.ones_like(theta), theta)).flatten(-2)
        return torch.cat([turned, t[..., 2 * pairs :]], -1)

    k = prepared(module.key(x), module.key_scale, module.key_bias)
    q = prepared(module.query(x), module.query_scale, module.query_bias)
    state, out = torch.zeros(len(x), heads, module.channels, module.size).double(), []
    pair = torch.zeros_like(state)
    for t in range(x.shape[1]):
        a, step, share = (s[:, t, :, None, None] for s in (keep, dt, blend))
        new = k[:, t, :, :, None] * v[:, t, :, None]
        state, pair = a * state + (1 - share) * step * a * pair + share * step * new, new
        out.append((state * q[:, t, :, :, None]).sum(-2) + module.skip[:, None] * v[:, t])
    return module.out(merge_heads(torch.stack(out, 2)) * F.silu(module.out_gate(x)))


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
