"""Second-degree polynomials in linear time, worked by hand; tests/ops tests the op."""

import pytest

from support.hand import plain, read


def test_by_hand():
    # (2 + 1)^2 and (4 + 1)^2, as features of one channel: 1, sqrt(2) x and x^2.
    assert read(plain("polynomial(eps=0.0)"), 1.0, 2.0) == pytest.approx([1.0, (9 + 50) / 34])


def test_the_series_by_hand():
    # 1 + u + u^2 / 2 of u = 2 and 4: 5 and 13.
    assert read(plain("polynomial(taylor=True, eps=0.0)"), 1.0, 2.0) == pytest.approx([1.0, (5 + 26) / 18])
