"""RWKV-7, worked by hand; the recurrence itself is tested with the ops."""

import math

import pytest
import torch

import longspan
from support.hand import plain
from support.mechanisms import fill, seeded, tokens

X = tokens((2, 0), (1, 0), (0, 3), (1, 1))
W = math.exp(-math.exp(-0.5) / 2)


class Same(torch.nn.Module):
    """In place of a norm."""

    def forward(self, x):
        return x


def bare(**weights):
    """Two channels without mixes, norm and bonus; rates 1/2, decays W, a gate of 1."""
    module = plain("rwkv7(gate_rank=2)", 2)
    fill(module, mixes=0.0, decay__1__weight=0.0, decay__1__bias=0.0, rate__1__weight=0.0, rate__1__bias=0.0)
    # The two channels of the gate are sigmoid(0) = 1/2 each.
    fill(module, gate__0__weight=0.0, gate__1__weight=1.0, removal=1.0, boost=1.0, bonus=0.0)
    fill(module, **weights)
    module.norm = Same()
    return module


def test_by_hand():
    # Written keys are half of the keys, and half of what the unit key reads is erased.
    # S_1 = Diag(2, 0), S_2 = Diag(2 W - 1 + 1/2, 0), S_3 = Diag(W S_2, 9/2), which the last token reads as
    # (S_3[0], 9/2) / root 2; it erases half of that along (1, 1) / root 2, and writes 1/2 everywhere.
    second = 2 * W - 0.5
    third = W * second
    # o_4 = the sum of both rows of S_4.
    last = torch.tensor([W * third - third / 2 + 1, W * 4.5 - 4.5 / 2 + 1])
    expected = tokens((4, 0), (second, 0), (0, 13.5), last.tolist())
    torch.testing.assert_close(bare()(X)[0], expected, rtol=0, atol=1e-6)


def test_a_bonus_by_hand():
    """(r * rho * k) v is added: (2 * 1) (2, 0), (1 * 1/2) (1, 0), 9 / 2 * 3 and 1/2 + 1/2 times the ones."""
    added = bare(bonus=1.0)(X)[0] - bare()(X)[0]
    torch.testing.assert_close(added, tokens((4, 0), (0.5, 0), (0, 13.5), (1, 1)), rtol=0, atol=1e-12)


def test_keys_by_hand():
    """Without rates nothing is erased, and alpha = 1 leaves nothing to write; with alpha = 0 keys stay whole."""
    assert bare(rate__1__bias=-1e3)(X)[0].abs().max() == 0
    whole = bare(rate__1__bias=-1e3, boost=0.0)(X)[0]
    torch.testing.assert_close(whole[:, :2], tokens((8, 0), (4 * W + 1, 0)), rtol=0, atol=1e-12)
    # theta turns the erased direction: the second channel alone has nothing stored.
    turned = bare(removal=[0.0, 1.0])(X)[0]
    torch.testing.assert_close(turned[:, :2], tokens((4, 0), (2 * W + 0.5, 0)), rtol=0, atol=1e-12)


def test_mixes_of_one_are_the_tokens_before():
    before = torch.cat([torch.zeros_like(X[:, :1]), X[:, :-1]], 1)
    torch.testing.assert_close(bare(mixes=1.0)(X)[0], bare()(before)[0], rtol=0, atol=0)


def test_norm_per_head():
    """Each head of the output has mean 0 and variance 1 before the gate, whatever the scale of the values."""
    module, x = seeded("rwkv7", 12, 2)
    seen = []
    module.get_submodule("norm").register_forward_hook(lambda module, given, out: seen.append(out))
    fill(module, bonus=0.0, value__weight=100 * module.get_parameter("value.weight"))
    module(x)
    heads = seen[0].unflatten(-1, (2, 6))
    torch.testing.assert_close(heads.mean(-1), torch.zeros_like(heads[..., 0]), rtol=0, atol=1e-9)
    torch.testing.assert_close(heads.var(-1, correction=0), torch.ones_like(heads[..., 0]), rtol=0, atol=1e-2)


def test_ranks():
    module = longspan.build("rwkv7", 256, 4)
    assert [len(module.get_parameter(f"{name}.0.weight")) for name in ("decay", "rate", "gate")] == [32, 32, 64]
    with pytest.raises(ValueError, match="gate_rank=0 must be at least 1"):
        longspan.build("rwkv7(gate_rank=0)", 8, 2)
