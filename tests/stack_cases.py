"""Small stacks and data, for the tests of stacks."""

import torch
from torch import nn

from longspan import StackConfig
from longspan.models.stacks import Stack

SMALL = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 24}


def stack(seed=0, **fields):
    torch.manual_seed(seed)
    made = Stack(StackConfig(**SMALL | fields)).double()
    for p in made.parameters():
        nn.init.normal_(p, std=0.4)
    return made


def data(n=13, batch=2, seed=1):
    return torch.randn(batch, n, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grads(module, y, x):
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(7))
    return torch.autograd.grad((y * weight).sum(), [x, *module.parameters()], allow_unused=True)


def same(a, b, bound=1e-12):
    for one, two in zip(a, b, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, rtol=bound, atol=bound)
