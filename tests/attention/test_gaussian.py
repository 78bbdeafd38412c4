"""Bells around a place: loops over both kinds, and their limits."""

import math

import pytest
import torch

import longspan
from hand import plain, read

N = 11
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 7, [2] * 11])
KINDS = ("learned", "fixed")


def data(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(kind, causal=True):
    torch.manual_seed(0)
    return longspan.build(f"gaussian(kind={kind!r})", 6, 3, causal=causal).double()


def heads(x):
    return x.unflatten(-1, (3, -1)).transpose(1, 2)


def bias(module, query, h, i, j, seen):
    """G_ij of head h, from a query (dim,), positions and the number of tokens that it sees."""
    if module.kind == "fixed":
        return -abs(float(module.w[h]) * (i - j) ** 2 + float(module.b[h]))
    hidden = (module.hidden.weight @ query).tanh()
    place = seen / (1 + math.exp(-float(module.centre.weight[h] @ hidden)))
    width = seen / (1 + math.exp(-float(module.width.weight[h] @ hidden)))
    return -((j - place) ** 2) / (2 * (width / 2) ** 2)


@torch.no_grad()
def loops(module, x, at, allowed):
    """Pair by pair: x (B,N,dim), positions as lists, allowed (B,N,N) -> (B,N,dim)."""
    query = module.query(x)
    q, k, v = heads(query), heads(module.key(x)), heads(module.value(x))
    out = torch.zeros_like(v)
    for b in range(len(x)):
        for i in range(x.shape[1]):
            keys = allowed[b, i].nonzero().flatten().tolist()
            for h in range(3):
                scores = [
                    float(q[b, h, i] @ k[b, h, j]) / math.sqrt(2)
                    + bias(module, query[b, i], h, at[b][i], at[b][j], len(keys))
                    for j in keys
                ]
                total = sum(map(math.exp, scores))
                for score, j in zip(scores, keys, strict=True):
                    out[b, h, i] += math.exp(score) / total * v[b, h, j]
    return module.out(out.transpose(1, 2).flatten(-2))


def test_by_hand():
    """All keys tie but for the bells: fixed, of 2^-(distance^2); learned, around 1 with a deviation of 1/2."""
    fixed, learned = (plain(f"gaussian(kind={kind!r})", asking=False) for kind in ("fixed", "learned"))
    with torch.no_grad():
        fixed.w.fill_(math.log(2))
        fixed.b.zero_()
    assert read(fixed, 1.0, 2.0, 4.0) == pytest.approx([1.0, 2.5 / 1.5, (1 / 16 + 1 + 4) / (1 / 16 + 1 / 2 + 1)])
    # The second token sees two; sigmoid(0) of two is 1, the place as well as twice the deviation.
    far = math.exp(-2)
    assert read(learned, 1.0, 2.0) == pytest.approx([1.0, (far + 2) / (far + 1)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_loops(kind, causal):
    module, x, plain = build(kind, causal), data(2, N, 6), [list(range(N))] * 2
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


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_packed_calls_read_on_at_their_positions(kind):
    module, x = build(kind), data(2, N, 6)
    whole = module(x)[0]
    with torch.no_grad():
        _, state = module(x[:, :5], module.init_state(2, 7))
        y, _ = module(x[:, 5:], state, segments=torch.tensor([[0] * 4 + [1] * 2] * 2))
    torch.testing.assert_close(y[:, :4], whole[:, 5:9], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[:, 4:], module(x[:, 9:])[0], rtol=1e-10, atol=1e-10)


def test_a_bell_of_no_curvature_is_softmax():
    module, other, x = build("fixed"), longspan.build("softmax", 6, 3).double(), data(2, N, 6)
    torch.nn.init.zeros_(module.w)
    torch.nn.init.constant_(module.b, -0.7)  # the same for all keys
    other.load_state_dict({name: w for name, w in module.state_dict().items() if name not in ("w", "b")})
    torch.testing.assert_close(module(x)[0], other(x)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_a_narrow_bell_reads_the_value_where_it_stands(causal):
    """Widths of 1e-6 tokens at the least, places 0.73 of the way from the beginning: no other key counts."""
    module, x = build("learned", causal), data(2, N, 6)
    with torch.no_grad():
        module.query.weight.zero_()
        module.query.bias.fill_(1.0)
        module.hidden.weight.copy_(100 * torch.eye(6))  # tanh gives 1
        module.width.weight.fill_(-1000.0)
        module.centre.weight.fill_(math.log(0.73 / 0.27) / 6)
    values = module.value(x)
    nearest = [round(0.73 * (i + 1 if causal else N)) for i in range(N)]
    nearest = [min(j, i) if causal else j for i, j in enumerate(nearest)]
    y = module(x)[0]
    torch.testing.assert_close(y, module.out(values[:, nearest]), rtol=1e-10, atol=1e-10)
    for part in (module.query, module.width):
        (found,) = torch.autograd.grad(module(x)[0].sum(), part.weight)
        assert found.isfinite().all()


def test_a_causal_window_does_not_know_the_length():
    """Published places are a share of the whole length; here it is of what the token sees."""
    module, both, x = build("learned"), build("learned", causal=False), data(2, N, 6)
    torch.testing.assert_close(module(x[:, :7])[0], module(x)[0][:, :7], rtol=1e-10, atol=1e-10)
    # The last token sees everything in both forms.
    torch.testing.assert_close(module(x)[0][:, -1], both(x)[0][:, -1], rtol=1e-10, atol=1e-10)


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="unknown kind of window 'laplace'; known: fixed, learned"):
        longspan.build("gaussian(kind='laplace')", 8, 2)
