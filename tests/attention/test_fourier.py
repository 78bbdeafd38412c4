"""Attention by Fourier features, worked by hand; what it shares with performer is tested there."""

import torch

from longspan.ops.linear import stabilized
from support.hand import plain


def test_by_hand():
    """w = pi / 2: cos of a quarter turn per unit of distance; at distance two the weight is -1 and nothing is left."""
    module = plain("fourier(features=1, eps=0.5)")
    module.projection.fill_(torch.pi / 2)
    x = torch.tensor([[[0.0], [1.0], [2.0]]]).double()
    # Weights of the third token: -1, 0, 1. The denominator 0 becomes eps, as if it were positive: 2 / 0.5.
    torch.testing.assert_close(module(x)[0][0, :, 0], torch.tensor([0.0, 1.0, 4.0]).double())
    found = stabilized.divide(torch.tensor([[3.0, -2.0], [3.0, -0.1], [3.0, 0.1], [3.0, 2.0]]), 0.5)
    assert found[:, 0].tolist() == [-1.5, -6.0, 6.0, 1.5]
