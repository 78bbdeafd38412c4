"""The delta rule with a decay per channel, worked by hand; the recurrence itself is tested with the ops."""

import math

import torch

from support.hand import plain
from support.mechanisms import Bare, fill, tokens

S = 1 / (1 + math.exp(-1.0))  # silu(1): what every projected one becomes


def test_by_hand():
    module = plain("kda(convolution=0)", 2)
    # beta = 1/2; alpha = (1/2, 1/4), as softplus(0) = log 2 and softplus(log 3) = log 4.
    fill(module, rate__weight=0.0, decay__1__weight=0.0, a_log=0.0, dt_bias=[[0.0, math.log(3)]])
    module.norm = Bare()
    # S_1 = [[s/2, 0], [0, 0]], S_2 = [[s/4, 0], [0, s/2]]; then the second key finds s/8 and the first one s/16.
    expected = tokens((S / 2, 0), (0, S / 2), (0, 9 * S / 16), (17 * S / 32, 0)) / math.sqrt(2)
    found = module(tokens((1, 0), (0, 1), (0, 1), (1, 0)))[0]
    # A key's length is sqrt(s^2 + 1e-6).
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_lower_bound_by_hand():
    module = plain("kda(convolution=0, lower_bound=-2.0)", 2)
    # log alpha = -2 sigmoid(0) = -1 in both channels.
    fill(module, rate__weight=0.0, decay__1__weight=0.0, a_log=0.0, dt_bias=0.0)
    module.norm = Bare()
    left = S / 2 / math.e
    found = module(tokens((1, 0), (1, 0)))[0]
    expected = tokens((S / 2, 0), (left + (S - left) / 2, 0)) / math.sqrt(2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
