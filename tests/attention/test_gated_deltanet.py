"""The delta rule with a decay per head, worked by hand; the recurrence itself is tested with the ops."""

import math

import torch

from support.hand import plain
from support.mechanisms import Bare, fill, tokens

S = 1 / (1 + math.exp(-1.0))  # silu(1): what every projected one becomes


def test_by_hand():
    module = plain("gated_deltanet(convolution=0, gate=False, expand_v=1.0)", 2)
    # beta = 1/2; log alpha = -log 2 softplus(log(e - 1)) = -log 2.
    fill(module, rate__weight=0.0, decay__weight=0.0, a_log=math.log(math.log(2)), dt_bias=math.log(math.e - 1))
    module.norm = Bare()
    # S_1 = [[s/2, 0], [0, 0]], S_2 = [[s/4, 0], [0, s/2]]; of the first key s/8 is left: s/8 + (s - s/8) / 2.
    expected = tokens((S / 2, 0), (0, S / 2), (9 * S / 16, 0)) / math.sqrt(2)
    found = module(tokens((1, 0), (0, 1), (1, 0)))[0]
    # A key's length is sqrt(s^2 + 1e-6).
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
