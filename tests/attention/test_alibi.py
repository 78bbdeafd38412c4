"""Scores that fall with distance: slopes for any number of heads, loops, and the form with the key's position alone."""

import pytest
import torch

import longspan
from longspan.attention import alibi
from support.tensors import data

# Steps between slopes, as powers of two: 2^(-8 / heads) for 8 heads is 1/2.
EIGHT = [2.0**-h for h in range(1, 9)]
SIXTEEN = [2.0 ** (-h / 2) for h in range(1, 17)]


def build(causal=True, heads=3):
    torch.manual_seed(0)
    return longspan.build("alibi", 6, heads, causal=causal).double()


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        (3, [1 / 16, 1 / 256, 1 / 4]),
        (4, [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (8, EIGHT),
        (12, EIGHT + SIXTEEN[0:8:2]),
        (16, SIXTEEN),
    ],
)
def test_slopes(heads, expected):
    assert alibi.slopes(heads) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bias_is_float32_at_least(dtype):
    """bfloat16 counts to 256; with queries of zero the weights are the bias alone, exactly m^distance in shape."""
    n, record = 307, {}
    module = longspan.build("alibi", 12, 12).to(dtype)
    torch.nn.init.zeros_(module.query.weight)
    torch.nn.init.zeros_(module.query.bias)
    module(data(1, n, 12).to(dtype), record=record)
    distance = (n - 1 - torch.arange(n)).double()
    exact = (-torch.tensor(alibi.slopes(12)).double()[:, None] * distance).softmax(-1)
    torch.testing.assert_close(record["matrix"][0, :, -1].double(), exact, rtol=1e-4, atol=1e-7)
