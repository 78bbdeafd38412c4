"""Longhorn against its recurrence number by number."""

import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import fill


def test_equals_its_recurrence():
    heads, channels, size, n = 2, 3, 4, 29
    module = longspan.build(f"longhorn(channels={channels}, expand=1.0, convolution=0)", 8, heads).double()
    fill(module, skip=torch.linspace(-1, 2, 8))
    x = torch.randn(2, n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, state, rows = F.silu(module.input(x)), torch.zeros(2, heads, channels, size, dtype=torch.float64), []
    for t in range(n):
        k, q = (project(u[:, t]).view(2, heads, channels, 1) for project in (module.key, module.query))
        beta, value = module.rate(u[:, t]).sigmoid().view(2, heads, 1, size), u[:, t].view(2, heads, 1, size)
        step = beta / (1 + beta * k.square().sum(2, keepdim=True))
        state = (1 - step * k.square()) * state + k * step * value
        rows.append(((q * state).sum(2) + module.skip.view(heads, size) * value[:, :, 0]).flatten(1))
    right = module.out(torch.stack(rows, 1) * F.silu(module.gate(x)))
    torch.testing.assert_close(module(x)[0], right, rtol=0, atol=1e-12)


def test_long_keys_leave_finite_decays():
    """Delta k^2 rounds to 1."""
    module = longspan.build("longhorn(channels=1, expand=1.0, convolution=0)", 4, 2)
    fill(module, key__weight=1e4)
    x = torch.ones(1, 3, 4, requires_grad=True)
    y = module(x)[0]
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())
