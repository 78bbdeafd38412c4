"""Linear attention, worked by hand; its kernels and its forms are tested with the ops."""

import pytest

from support.hand import plain, read


def test_by_hand():
    # phi is 1, 2 and 4: for any query, (0 + 2) / 3 and (0 + 2 + 12) / 7.
    assert read(plain("linear(eps=0.0)"), 0.0, 1.0, 3.0) == pytest.approx([0.0, 2 / 3, 2.0])
    assert read(plain("linear(eps=0.0)", causal=False), 0.0, 1.0, 3.0) == pytest.approx([2.0] * 3)


def test_other_feature_maps_by_hand():
    # relu: 1, 0 and 2; the second query is 0 and reads 0 / eps = 0.
    assert read(plain("linear(feature_map='relu')"), 1.0, -3.0, 2.0) == pytest.approx([1.0, 0.0, 5 / 3], abs=1e-5)
    # Squares: 1, 0 and 4.
    found = read(plain("linear(feature_map='squared_relu')"), 1.0, -3.0, 2.0)
    assert found == pytest.approx([1.0, 0.0, 9 / 5], abs=1e-5)
