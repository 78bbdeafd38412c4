"""Softmax attention, worked by hand; tests/ops tests the op."""

import pytest

from support.hand import plain, read


def test_by_hand():
    # a^2 = log 2, so that the second token's scores are -log 2 and log 2: weights 1/2 and 2 of a and -a.
    a = 0.8325546111576977
    assert read(plain("softmax"), a, -a) == pytest.approx([a, (0.5 - 2) / 2.5 * a])


def test_both_directions_by_hand():
    a = 0.8325546111576977
    assert read(plain("softmax", causal=False), a, -a) == pytest.approx([0.6 * a, -0.6 * a])


def test_equal_scores_give_the_mean():
    assert read(plain("softmax", asking=False), 1.0, 2.0, 6.0) == [1.0, 1.5, 3.0]
