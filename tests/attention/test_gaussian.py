"""Bells around a place: loops over both kinds, and their limits."""

import math

import pytest
import torch

import longspan
from support.tensors import data

N = 11


def build(kind, causal=True):
    torch.manual_seed(0)
    return longspan.build(f"gaussian(kind={kind!r})", 6, 3, causal=causal).double()


@pytest.mark.parametrize("causal", [True, False])
def test_a_narrow_bell_reads_the_value_where_it_stands(causal):
    """Widths of 1e-6 tokens at the least, places 0.73 of the way from the beginning: no other key counts."""
    module, x = build("learned", causal), data(2, N, 6)
    with torch.no_grad():
        module.query.weight.zero_()
        module.query.bias.fill_(1.0)
        module.hidden.weight.copy_(100 * torch.eye(6))  # tanh gives 1
        module.width.weight.fill_(-1000.0)
        module.centre.weight.fill_(math.log(0.73 / 0.27) / 6)
    values = module.value(x)
    nearest = [round(0.73 * (i + 1 if causal else N)) for i in range(N)]
    nearest = [min(j, i) if causal else j for i, j in enumerate(nearest)]
    y = module(x)[0]
    torch.testing.assert_close(y, module.out(values[:, nearest]), rtol=1e-10, atol=1e-10)
    for part in (module.query, module.width):
        (found,) = torch.autograd.grad(module(x)[0].sum(), part.weight)
        assert found.isfinite().all()
