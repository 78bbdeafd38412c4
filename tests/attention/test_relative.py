"""Softmax by content and distance: by hand, pair by pair, against transformer_xl, and both forms against each other."""

import math

import pytest
import torch

import longspan
from support.hand import plain, read
from support.tensors import data


def build(options="", causal=True):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = longspan.build(f"relative({options})", 8, 2, causal=causal).double()
        torch.nn.init.normal_(module.u)
        torch.nn.init.normal_(module.v)
        return module


def test_by_hand():
    """Content does not matter, and v is 1: the score of a key d tokens back is W_r sin d, W_r = 1."""
    module = plain("relative", asking=False)
    with torch.no_grad():
        module.u.zero_()
        module.v.fill_(1.0)
        module.distance.weight.fill_(1.0)
    one, two = math.exp(math.sin(1)), math.exp(math.sin(2))
    expected = [1.0, (one + 2) / (one + 1), (two + 2 * one + 4) / (two + one + 1)]
    assert read(module, 1.0, 2.0, 4.0) == pytest.approx(expected)


@pytest.mark.parametrize("causal", [True, False])
def test_the_shift_equals_the_gather(causal):
    """Whole sequences shift products; with a record, each pair gathers its product by distance."""
    module, x = build("", causal), data(2, 139, 8)
    torch.testing.assert_close(module(x)[0], module(x, record={})[0], rtol=1e-11, atol=1e-11)
