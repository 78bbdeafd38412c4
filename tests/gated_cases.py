"""What the tests of mechanisms with decay and the delta rule share: weights set by name, tokens, heads side by side."""

import torch
from torch import nn

import longspan

B, N, DIM, HEADS = 2, 13, 8, 2


class Bare(nn.Module):
    """In place of a norm, which would hide what it is given."""

    def forward(self, x, gate):
        return x


def seeded(spec, dim=DIM, heads=HEADS, seed=0, **options):
    """An attention in float64 with weights from the seed, and some inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = longspan.build(spec, dim, heads, **options).double()
        return module, torch.randn(B, N, dim, dtype=torch.float64)


@torch.no_grad()
def fill(module, **weights):
    """Set parameters by name, ``__`` for a dot: a number for all entries, or what has the parameter's shape."""
    for name, value in weights.items():
        parameter = module.get_parameter(name.replace("__", "."))
        parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype).expand_as(parameter))


def tokens(*rows):
    return torch.tensor([rows], dtype=torch.float64)


def heads_of(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x):
    return x.transpose(1, 2).flatten(-2)
