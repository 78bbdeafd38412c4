"""The delta rule, worked by hand; the recurrence itself is tested with the ops."""

import math

import torch
from torch import nn

from support.hand import plain
from support.mechanisms import fill, tokens

S = 1 / (1 + math.exp(-1.0))  # silu(1): what every projected one becomes


def bare(spec):
    """Without convolution and norm; beta = 1/2."""
    module = plain(spec, 2)
    fill(module, rate__weight=0.0)
    module.norm = nn.Identity()
    return module


def test_by_hand():
    # S_1 = [[s/2, 0], [0, 0]], S_2 = s/2 I; the first key returns and is replaced by half: s/2 + (s - s/2) / 2.
    expected = tokens((S / 2, 0), (0, S / 2), (3 * S / 4, 0)) / math.sqrt(2)
    found = bare("deltanet(convolution=0)")(tokens((1, 0), (0, 1), (1, 0)))[0]
    # A key's length is sqrt(s^2 + 1e-6).
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_with_a_step_of_one_a_key_has_its_last_value():
    # negative=True doubles beta: 1.
    found = bare("deltanet(convolution=0, negative=True)")(tokens((1, 0), (0, 1), (1, 0)))[0]
    torch.testing.assert_close(found, tokens((S, 0), (0, S), (S, 0)) / math.sqrt(2), rtol=0, atol=1e-5)
