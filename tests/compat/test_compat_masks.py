"""Masks of ``compat.fast_transformers``: True means keep, and all properties agree."""

import pytest
import torch

from longspan.compat.fast_transformers.masking import BaseMask, FullMask, LengthMask, TriangularCausalMask


def test_a_full_mask_is_made_in_four_ways():
    keep = torch.tensor([[True, False], [True, True], [False, True]])
    given = FullMask(keep)
    keep[0, 0] = False
    assert given.bool_matrix.tolist() == [[True, False], [True, True], [False, True]]
    assert not given.all_ones
    for mask, shape in ((FullMask(3), (3, 3)), (FullMask(3, 5), (3, 5)), (FullMask(N=3, M=5), (3, 5))):
        assert mask.shape == shape
        assert mask.bool_matrix.all()
        assert mask.all_ones is True
    with pytest.raises(ValueError, match=r"bool.*torch.float32"):
        FullMask(torch.ones(2, 2))
    with pytest.raises(ValueError, match="FullMask"):
        FullMask()
    with pytest.raises(NotImplementedError, match="BaseMask.*bool_matrix"):
        _ = BaseMask().bool_matrix


def test_a_length_mask_keeps_the_first_of_each_row():
    mask = LengthMask(torch.tensor([2, 0, 3]))
    assert mask.bool_matrix.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert LengthMask(torch.tensor([2, 0, 3]), max_len=5).shape == (3, 5)
    assert mask.lengths.tolist() == [2, 0, 3]
    assert mask.float_matrix.sum().item() == 5
    assert mask.additive_matrix[0].tolist() == [0, 0, -torch.inf]
    assert mask.additive_matrix_finite[0].tolist() == [0, 0, torch.tensor(-1e24).item()]
    assert {m.dtype for m in (mask.float_matrix, mask.additive_matrix, mask.additive_matrix_finite)} == {torch.float32}
    assert not mask.all_ones
    assert LengthMask(torch.tensor([3, 3])).all_ones
    with pytest.raises(ValueError, match=r"lengths.*\(1, 2\)"):
        LengthMask(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="length mask"):
        _ = FullMask(torch.tensor([[True, False, True]])).lengths


def test_a_triangular_mask_is_known_however_it_was_made():
    assert TriangularCausalMask(3).bool_matrix.tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert not TriangularCausalMask(3).all_ones
    for mask in (
        TriangularCausalMask(5),
        FullMask(torch.ones(5, 5, dtype=torch.bool).tril()),
        LengthMask(torch.arange(1, 6), max_len=7),
    ):
        assert mask.lower_triangular
    for mask in (FullMask(5), LengthMask(torch.tensor([1, 2, 2])), FullMask(torch.ones(2, 3, 3, dtype=torch.bool))):
        assert not mask.lower_triangular
