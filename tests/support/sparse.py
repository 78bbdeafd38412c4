"""What the tests of attention under patterns share: inputs, dense attention under a mask, sets of keys as rules."""

from typing import Any

import torch

import longspan

from .tensors import same

N = 37


def data(n=N, dim=6, batch=2, seed=0):
    return torch.randn(batch, n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(spec, heads=2, dim=6, **place) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return longspan.build(spec, dim, heads, **place).double().eval()


def heads_of(module, x, *parts):
    return (getattr(module, part)(x).unflatten(-1, (module.heads, -1)).transpose(1, 2) for part in parts)


def softmax(allowed, q, k, v):
    weights = (q @ k.mT * q.shape[-1] ** -0.5).exp() * allowed
    # A query that sees nothing reads 0.
    return weights / weights.sum(-1, keepdim=True).where(allowed.any(-1, keepdim=True), 1.0) @ v


def dense(module, x, allowed):
    """The definition, under a mask (N,N) or (H,N,N)."""
    o = softmax(allowed, *heads_of(module, x, "query", "key", "value"))
    return module.out(o.transpose(1, 2).flatten(-2))


def agree(module, x, allowed):
    """In outputs and in the gradients of all weights."""
    same(module(x)[0], dense(module, x, allowed), module.parameters())


def pairs(n, rule):
    return torch.tensor([[rule(i, j) for j in range(n)] for i in range(n)])


def past(n=N):
    return torch.ones(n, n, dtype=torch.bool).tril()
