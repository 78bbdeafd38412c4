"""The sliding window, worked by hand; how it is cut into tiles is tested with the ops."""

import pytest

import longspan
from support.hand import numbers, plain, read


def test_by_hand():
    # All keys tie, so a token reads the mean of itself and of the one before.
    assert read(plain("local(window=2)", asking=False), 1.0, 2.0, 4.0, 8.0) == [1.0, 1.5, 3.0, 6.0]
    both = read(plain("local(window=2)", asking=False, causal=False), 1.0, 2.0, 4.0, 8.0)
    assert both == pytest.approx([1.5, 7 / 3, 14 / 3, 6.0])


def test_a_window_of_one_is_the_token_itself():
    assert read(plain("local(window=1)"), 3.0, -1.0) == [3.0, -1.0]


def test_the_state_is_the_window():
    module = longspan.build("local(window=3)", 4, 2).double()
    _, state = module(numbers(*[[float(t)] * 4 for t in range(7)]), module.init_state(1))
    assert state.keys.shape == (1, 2, 3, 2)
