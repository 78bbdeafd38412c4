"""Scores that fall with distance: slopes for any number of heads, loops, and the form with the key's position alone."""

import math

import pytest
import torch

import longspan
from hand import plain, read
from longspan.attention import alibi

N = 11
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 7, [2] * 11])
# Steps between slopes, as powers of two: 2^(-8 / heads) for 8 heads is 1/2.
EIGHT = [2.0**-h for h in range(1, 9)]
SIXTEEN = [2.0 ** (-h / 2) for h in range(1, 17)]


def data(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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


@torch.no_grad()
def loops(module, x, at, allowed):
    """Pair by pair: x (B,N,dim), positions as lists, allowed (B,N,N) -> (B,N,dim)."""
    q, k, v = project(module, x)
    out = torch.zeros_like(v)
    for b in range(len(x)):
        for h in range(module.heads):
            for i in range(x.shape[1]):
                keys = allowed[b, i].nonzero().flatten().tolist()
                scores = [
                    float(q[b, h, i] @ k[b, h, j]) / math.sqrt(q.shape[-1])
                    - alibi.slopes(module.heads)[h] * abs(at[b][i] - at[b][j])
                    for j in keys
                ]
                total = sum(map(math.exp, scores))
                for score, j in zip(scores, keys, strict=True):
                    out[b, h, i] += math.exp(score) / total * v[b, h, j]
    return module.out(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_loops(causal):
    module, x, plain = build(causal), data(2, N, 6), [list(range(N))] * 2
    everything = torch.ones(2, N, N, dtype=torch.bool)
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    cases = (
        ({}, plain, everything),
        ({"mask": MASK}, [[0, 1, 2, 0, 0, 3, 4, 5, 6, 7, 8], [0, *range(10)]], everything & MASK[:, None, :]),
        ({"segments": SEGMENTS}, [[*range(4), *range(7)], plain[1]], same),
    )
    for arguments, at, allowed in cases:
        real = arguments.get("mask", torch.ones_like(MASK))
        expected = loops(module, x, at, allowed.tril() if causal else allowed)
        found = module(x, **arguments)[0]
        torch.testing.assert_close(found[real], expected[real], rtol=1e-10, atol=1e-10)


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


def test_steps_and_packed_calls_read_on_at_their_positions():
    module, x = build(), data(2, N, 6)
    whole = module(x)[0]
    with torch.no_grad():
        _, state = module(x[:, :5], module.init_state(2, 7))
        y, _ = module(x[:, 5:], state, segments=torch.tensor([[0] * 4 + [1] * 2] * 2))
    torch.testing.assert_close(y[:, :4], whole[:, 5:9], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[:, 4:], module(x[:, 9:])[0], rtol=1e-10, atol=1e-10)


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
