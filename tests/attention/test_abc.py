"""ABC, worked by hand: one slot is the mean of all tokens, the other weighs them by powers of two."""

import math

import pytest

from support.hand import plain, read


def test_by_hand():
    module = plain("abc(slots=2)")
    module.control.weight.data[:] = module.control.weight.new_tensor([[0.0], [math.log(2)]])
    # The weights of the tokens 1 and 2 are 1/2 and 1/2 in the first slot, 2/6 and 4/6 in the second.
    first, second = 1.5, 5 / 3
    p = 1 / (1 + math.exp(2 * second - 2 * first))
    assert read(module, 1.0, 2.0) == pytest.approx([1.0, p * first + (1 - p) * second])
