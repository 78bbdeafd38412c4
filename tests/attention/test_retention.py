"""The retention of RetNet as the paper's equations over all pairs."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import HEADS, N, seeded
from support.tensors import merge_heads, split_heads


@pytest.mark.parametrize("rotary", [0.0, 10000.0])
def test_is_the_matrix_of_all_pairs(rotary):
    """Eqs 5 to 8 of the paper, with positions as complex numbers."""
    module, x = seeded(f"retention(rotary={rotary})", 16)
    q, k, v = (split_heads(project(x)) for project in (module.query, module.key, module.value))
    gap = torch.arange(N)[:, None] - torch.arange(N)
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))
    decay = torch.where(gap >= 0, gamma[:, None, None] ** gap.clamp(min=0), 0.0)
    rates = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4) * bool(rotary)
    a, b = (torch.complex(*t.chunk(2, -1)) for t in (q, k))
    turned = torch.polar(torch.ones(N, N, 4, dtype=torch.float64), gap[..., None] * rates)
    scores = torch.einsum("bhnd,nmd,bhmd->bhnm", a, turned, b.conj()).real / math.sqrt(8)
    o = merge_heads((scores * decay) @ v)
    o = F.group_norm(o.flatten(0, 1), HEADS).view_as(o)
    torch.testing.assert_close(module(x)[0], module.out(F.silu(module.out_gate(x)) * o))


def test_rates_are_defined_for_any_number_of_heads():
    rates = longspan.build("retention(rotary=0.0)", 100, 100).log_decay
    assert rates == sorted(rates)
    assert rates[-1] < 0
    assert rates[3] == pytest.approx(math.log(1 - 2**-8))


def test_initialization():
    module, _ = seeded("retention", 256, 4)
    found = [getattr(module, part).weight.abs().max().item() for part in ("query", "value", "out")]
    bounds = [(6 / 512) ** 0.5 * 2**-2.5, (6 / 768) ** 0.5 * 2**-2.5, (6 / 768) ** 0.5]
    assert found == pytest.approx(bounds, rel=0.01)
