"""Attention with a similarity of your choice, worked by hand; the similarities are tested with the op."""

import math

import pytest

from support.hand import plain, read


def test_by_hand():
    # s(2, 1) = (2 + 1)^2 and s(2, 2) = (4 + 1)^2.
    module = plain("kernel(similarity='polynomial', degree=2, constant=1.0)")
    assert read(module, 1.0, 2.0) == pytest.approx([1.0, (9 + 50) / 34])


def test_a_bell_by_hand():
    # At distance one e^(-1/2) with a bandwidth of 1.
    weight = math.exp(-0.5)
    module = plain("kernel(similarity='rbf', bandwidth=1.0)")
    assert read(module, 1.0, 2.0) == pytest.approx([1.0, (weight + 2) / (weight + 1)])
