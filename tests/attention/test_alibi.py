"""Scores that fall with distance: slopes for any number of heads, loops, and the form with the key's position alone."""

import math

import pytest
import torch

import longspan
from longspan.attention import alibi
from support.hand import plain, read
from support.tensors import data

N = 11
# Steps between slopes, as powers of two: 2^(-8 / heads) for 8 heads is 1/2.
EIGHT = [2.0**-h for h in range(1, 9)]
SIXTEEN = [2.0 ** (-h / 2) for h in range(1, 17)]


def build(causal=True, heads=3):
    torch.manual_seed(0)
    return longspan.build("alibi", 6, heads, causal=causal).double()


def project(module, x):
    return (
        part(x).unflatten(-1, (module.heads, -1)).transpose(1, 2) for part in (module.query, module.key, module.value)
    )


def test_by_hand():
    """All keys tie but for the distance; the slope of a single head is 2^-8."""
    near = math.exp(-1 / 256)
    assert read(plain("alibi", asking=False), 1.0, 2.0) == pytest.approx([1.0, (near + 2) / (near + 1)])


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


def test_the_position_of_the_key_alone_is_enough():
    """A bias of +m j differs from -m (i - j) by the same for all keys of a query, which softmax does not see."""
    module, x = build(), data(2, N, 6)
    q, k, v = project(module, x)
    m = torch.tensor(alibi.slopes(3), dtype=torch.float64)[:, None, None]
    scores = q @ k.mT * 2**-0.5 + m * torch.arange(N)
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    o = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(module(x)[0], module.out(o.transpose(1, 2).flatten(-2)), rtol=1e-10, atol=1e-10)


def test_without_slopes_it_is_softmax(monkeypatch):
    module, other, x = build(), longspan.build("softmax", 6, 3).double(), data(2, N, 6)
    other.load_state_dict(module.state_dict())
    assert (module(x)[0] - other(x)[0]).abs().max() > 1e-3
    monkeypatch.setattr(alibi, "slopes", lambda heads: [0.0] * heads)
    torch.testing.assert_close(module(x)[0], other(x)[0], rtol=1e-10, atol=1e-10)


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
