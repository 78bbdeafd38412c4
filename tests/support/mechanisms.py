"""Mechanisms with seeded weights, weights set by name, and tokens."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import longspan

B, N, DIM, HEADS = 2, 13, 8, 2


class Bare(nn.Module):
    """In place of a norm, which would hide what it is given."""

    def forward(self, x, *gate):
        return x


def seeded(spec, dim=DIM, heads=HEADS, n=N, seed=0, **options):
    """An attention in float64 with weights from the seed, and some inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = longspan.build(spec, dim, heads, **options).double()
        return module, torch.randn(B, n, dim, dtype=torch.float64)


@torch.no_grad()
def fill(module, **weights):
    """Set parameters and buffers by name, ``__`` for a dot: a number for all entries, or what has the shape."""
    for name, value in weights.items():
        tensor = module.state_dict()[name.replace("__", ".")]
        tensor.copy_(torch.as_tensor(value, dtype=tensor.dtype).expand_as(tensor))


def tokens(*rows):
    return torch.tensor([rows], dtype=torch.float64)


def in_parts(module, x, cuts):
    """Call a module on parts of x with ``cuts`` tokens each -> the outputs, joined, and the last state."""
    outs, state = [], module.init_state(len(x))
    for part in x.split(cuts, 1):
        y, state = module(part, state)
        outs.append(y)
    return torch.cat(outs, 1), state


def wave(distance, dim):
    """Sines and cosines of a distance, as in Transformer-XL."""
    angles = [distance / 10000 ** (2 * (c // 2) / dim) for c in range(dim)]
    return torch.tensor([math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(angles)], dtype=torch.float64)


def pairs_of_tokens(x, b, c, dt, rate, level):
    """The sum over pairs of Mamba-2, each weighed by its decay and ``level(i, j)`` (B,H): (B,N,H,.) -> (B,N,H,.)."""
    y = torch.zeros_like(x)
    for i in range(x.shape[1]):
        for j in range(i + 1):
            decay = (rate * dt[:, j + 1 : i + 1].sum(1)).exp()
            y[:, i] += (level(i, j) * (c[:, i] * b[:, j]).sum(-1) * decay * dt[:, j])[..., None] * x[:, j]
    return y


def three_terms(q, k, v, theta, keep, dt, share):
    """The recurrence of Mamba-3, with complex numbers for the rotations: (B,N,H,.) each -> (B,N,H,.)."""

    def turned(t):
        pairs = theta.shape[-1]
        first = torch.view_as_complex(t[..., : 2 * pairs].unflatten(-1, (pairs, 2)).contiguous())
        first = torch.view_as_real(first * torch.polar(torch.ones_like(theta), theta)).flatten(-2)
        return torch.cat([first, t[..., 2 * pairs :]], -1)

    q, k, rows = turned(q), turned(k), []
    state = pair = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype)
    for t in range(v.shape[1]):
        a, step, part = (s[:, t, :, None, None] for s in (keep, dt, share))
        new = k[:, t, :, :, None] * v[:, t, :, None]
        state, pair = a * state + (1 - part) * step * a * pair + part * step * new, new
        rows.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(rows, 1)


def state_space(module, u, level=lambda i, j: 1.0):
    """Mamba-2 as ``pairs_of_tokens``: u (B,N,dim) -> (B,N,dim)."""
    heads, groups, width = module.heads, module.key_heads, module.value.out_features
    mixed = torch.cat([module.value(u), module.key(u), module.query(u)], -1).mT
    mixed = F.conv1d(F.pad(mixed, (3, 0)), module.mix.weight[:, None], module.shift, groups=mixed.shape[1]).mT
    x, *both = F.silu(mixed).split([width, module.channels * groups, module.channels * groups], -1)
    x = x.unflatten(-1, (heads, -1))
    b, c = (t.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2) for t in both)
    dt = F.softplus(module.dt(u) + module.dt_bias)
    y = pairs_of_tokens(x, b, c, dt, -module.a_log.exp(), level)
    y = (y + module.skip[:, None] * x).flatten(-2) * F.silu(module.out_gate(u))
    y = F.rms_norm(y.unflatten(-1, (groups, -1)), (width // groups,), None, 1e-5).flatten(-2)
    return module.out(y * module.scale)
