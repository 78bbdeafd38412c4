"""Softmax by content and distance: by hand, pair by pair, against transformer_xl, and both forms against each other."""

import math

import pytest
import torch

import longspan
from hand import plain, read

N = 11
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 7, [2] * 11])


def data(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(options="", causal=True):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = longspan.build(f"relative({options})", 8, 2, causal=causal).double()
        torch.nn.init.normal_(module.u)
        torch.nn.init.normal_(module.v)
        return module


def test_by_hand():
    """Content does not matter, and v is 1: the score of a key d tokens back is W_r sin d, W_r = 1."""
    module = plain("relative", asking=False)
    with torch.no_grad():
        module.u.zero_()
        module.v.fill_(1.0)
        module.distance.weight.fill_(1.0)
    one, two = math.exp(math.sin(1)), math.exp(math.sin(2))
    expected = [1.0, (one + 2) / (one + 1), (two + 2 * one + 4) / (two + one + 1)]
    assert read(module, 1.0, 2.0, 4.0) == pytest.approx(expected)


@torch.no_grad()
def loops(module, x, at, allowed):
    """Pair by pair: x (B,N,dim), positions as lists, allowed (B,N,N) -> (B,N,dim)."""
    size, o = module.dim // module.heads, torch.zeros_like(x)
    q, k, v = (part(x) for part in (module.query, module.key, module.value))
    for b in range(len(x)):
        for h in range(module.heads):
            own = slice(h * size, (h + 1) * size)
            for i in range(x.shape[1]):
                seen = [j for j in range(x.shape[1]) if allowed[b, i, j]]
                scores = []
                for j in seen:
                    d = at[b][i] - at[b][j]
                    d = max(-module.clamp, min(module.clamp, d)) if module.clamp else d
                    angles = [d / 10000 ** (2 * (c // 2) / module.dim) for c in range(module.dim)]
                    wave = x.new_tensor([math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(angles)])
                    content = (q[b, i, own] + module.u[h]) @ k[b, j, own]
                    distance = (q[b, i, own] + module.v[h]) @ (module.distance.weight[own] @ wave)
                    scores.append((content + distance) / size**0.5)
                if seen:
                    o[b, i, own] = torch.stack(scores).softmax(0) @ v[b, seen, own]
    return module.out(o)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", ["", "clamp=3"])
@pytest.mark.parametrize("form", ["whole", "padded", "packed"])
def test_pair_by_pair(causal, options, form):
    module, x = build(options, causal), data(2, N, 8)
    arguments = {"whole": {}, "padded": {"mask": MASK}, "packed": {"segments": SEGMENTS}}[form]
    at, allowed = [list(range(N))] * 2, torch.ones(2, N, N, dtype=torch.bool)
    if form == "padded":
        at, allowed = [(row.cumsum(0) - row.long()).tolist() for row in MASK], MASK[:, None] & MASK[..., None]
    if form == "packed":
        at = [[*range(4), *range(7)], list(range(N))]
        allowed = SEGMENTS[:, None] == SEGMENTS[..., None]
    allowed = allowed.tril() if causal else allowed
    torch.testing.assert_close(module(x, **arguments)[0], loops(module, x, at, allowed), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("clamp", [0, 4])
@pytest.mark.parametrize("n", [5, 150])
def test_it_equals_transformer_xl_with_a_long_memory(causal, clamp, n):
    module, x = build(f"clamp={clamp}", causal), data(2, n, 8).requires_grad_()
    other = longspan.build(f"transformer_xl(memory={n}, clamp={clamp})", 8, 2, causal=causal).double()
    other.load_state_dict(module.state_dict())
    found = []
    for one in (module, other):
        y = one(x)[0]
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, *one.parameters()])))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_the_shift_equals_the_gather(causal):
    """Whole sequences shift products; with a record, each pair gathers its product by distance."""
    module, x = build("", causal), data(2, 139, 8)
    torch.testing.assert_close(module(x)[0], module(x, record={})[0], rtol=1e-11, atol=1e-11)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="clamp=-1"):
        longspan.build("relative(clamp=-1)", 8, 2)
