"""Synthesized scores against loops: their sources, the used part of the tables, and the largest length."""

import pytest
import torch

import longspan
from longspan.states import nbytes
from longspan.states.kv_cache import KeyValues
from support.tensors import data

KINDS = ("dense", "random", "factored_dense", "factored_random")
MIXTURES = (
    "random+dense",
    "factored_random+dot",
    "factored_dense+random",
    "dot+factored_dense+dense+factored_random+random",
)
N = 11
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])


def build(kind, *, length=N, causal=True, heads=2):
    torch.manual_seed(0)
    module = longspan.build(f"synthesizer(kind={kind!r}, length={length})", 6, heads, causal=causal).double()
    for offset in module.offsets:
        torch.nn.init.normal_(offset)
    if "+" in kind:
        torch.nn.init.normal_(module.mixture)
    return module


def table(module, x, kind):
    """S for one token x (dim,) at each position i and j: (H, length, length)."""
    heads, length = module.heads, module.length

    def network(i):
        hidden = module.hidden[i](x).clamp(min=0).view(heads, -1)
        return torch.stack([hidden[h] @ module.outputs[i][h] + module.offsets[i][h, 0] for h in range(heads)])

    match kind:
        case "dense":
            return network(0)[:, None].expand(-1, length, -1)
        case "random":
            return module.table
        case "factored_random":
            return torch.stack([module.rows[h] @ module.columns[h].T for h in range(heads)])
    a, b = network(-2), network(-1)
    row = [a[:, j % a.shape[1]] * b[:, j // a.shape[1]] for j in range(length)]
    return torch.stack(row, 1)[:, None].expand(-1, length, -1)


def row(module, x, kind, i, keys):
    """Scores of token i of x (N,dim) for some keys: (H, keys), by the mixture's definition."""
    parts = []
    for part in kind.split("+"):
        if part == "dot":
            q, k = module.query(x[i]).view(module.heads, -1), module.key(x[keys]).unflatten(-1, (module.heads, -1))
            parts.append(torch.einsum("hd,mhd->hm", q, k) / q.shape[-1] ** 0.5)
        else:
            parts.append(table(module, x[i], part)[:, i, keys])
    if len(parts) == 1:
        return parts[0]
    shares = module.mixture.exp() / module.mixture.exp().sum()
    return torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)


def loops(module, x, kind):
    """Row by row: x (B,N,dim) -> (B,N,dim)."""
    v = module.value(x).unflatten(-1, (module.heads, -1))
    out = torch.zeros_like(v)
    for b in range(len(x)):
        for i in range(x.shape[1]):
            keys = list(range(i + 1 if module.causal else x.shape[1]))
            s = row(module, x[b], kind, i, keys)
            out[b, i] = torch.einsum("hj,jhe->he", s.softmax(-1), v[b, keys])
    return module.out(out.flatten(-2))


@pytest.mark.parametrize("kind", KINDS + MIXTURES)
@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_loops(kind, causal):
    """The tables have rows and columns for more tokens."""
    module, x = build(kind, length=N + 2, causal=causal), data(2, N, 6)
    torch.testing.assert_close(module(x)[0], loops(module, x, kind), rtol=1e-10, atol=1e-10)


def test_two_factors_of_a_row_reach_every_position():
    """12 = 4 x 3, 13 = 4 x 4 less 3: each position has its own pair of factors."""
    for length, sizes in ((12, (4, 3)), (13, (4, 4)), (16, (4, 4)), (1, (1, 1)), (2, (2, 1))):
        module = build("factored_dense", length=length)
        assert tuple(w.shape[-1] for w in module.outputs) == sizes
        assert module(data(2, length, 6))[0].isfinite().all()


class TestLength:
    message = "position 5 is beyond length=5"

    @pytest.mark.parametrize("kind", KINDS + MIXTURES)
    def test_longer_sequences_are_refused(self, kind):
        module, x = build(kind, length=5), data(2, 6, 6)
        with pytest.raises(ValueError, match=self.message):
            module(x)
        with torch.no_grad():
            _, state = module(x[:, :5], module.init_state(2))
            for donate in (False, True):
                with pytest.raises(ValueError, match=self.message):
                    module(x[:, 5:], state, donate=donate)

    @pytest.mark.parametrize("kind", ["dense", "random", "factored_dense"])
    def test_longer_sequences_raise_when_compiled(self, kind):
        torch._dynamo.reset()
        module = torch.compile(build(kind, length=5), backend="eager", fullgraph=True)
        with pytest.raises((RuntimeError, IndexError), match="out of (bounds|range)"):
            module(data(2, 6, 6))

    @pytest.mark.parametrize("kind", KINDS)
    def test_other_segments_do_not_count(self, kind):
        module, x = build(kind, length=8), data(2, N, 6)
        segments = torch.tensor([[0] * 4 + [1] * 7, [0] * 8 + [5] * 3])
        y = module(x, segments=segments)[0]
        torch.testing.assert_close(y[:1, 4:], module(x[:1, 4:])[0], rtol=1e-10, atol=1e-10)


class TestMixture:
    def test_shares_are_equal_at_first_and_learn(self):
        module, x = longspan.build("synthesizer(kind='random+dense+dot', length=13)", 6, 2).double(), data(2, N, 6)
        assert module.mixture.softmax(0).tolist() == pytest.approx([1 / 3] * 3)
        module(x)[0].square().sum().backward()
        assert (module.mixture.grad != 0).all()
        assert module.mixture.grad.sum().abs() < 1e-10  # adding a constant to all kinds changes no share

    @pytest.mark.parametrize("kind", MIXTURES)
    def test_the_state_has_keys_only_for_dot(self, kind):
        module, dot = build(kind, length=13), "dot" in kind
        _, state = module(data(2, 7, 6), module.init_state(2, 7))
        assert isinstance(state, KeyValues) == dot
        assert nbytes(module.init_state(2, 7)) == nbytes(state) == (1 + dot) * 2 * 7 * 6 * 8 + 2 * 8
        other = build("dense" if dot else "dense+dot").init_state(2)
        with pytest.raises(ValueError, match="synthesizer cannot continue .*; its states are "):
            module(data(2, 7, 6), other)


@pytest.mark.parametrize(
    ("kind", "deviation"), [("random", 1.0), ("factored_random", 1.0), ("dense", 0.58), ("factored_dense", 0.35)]
)
def test_fresh_scores_have_the_documented_deviation(kind, deviation):
    torch.manual_seed(0)
    attention = longspan.build(f"synthesizer(kind='{kind}', length=256)", 64, 4)
    at = torch.arange(256).expand(4, 256)
    with torch.no_grad():
        found = attention._scores(kind, torch.randn(4, 256, 64), None, at, at)
    assert abs(found.std().item() / deviation - 1) < 0.05


@pytest.mark.parametrize("kind", ["dense", "random", "factored_random", "factored_dense", "random+dot"])
def test_padding_may_lie_beyond_the_scores(kind):
    torch.manual_seed(0)
    module = longspan.build(f"synthesizer(kind='{kind}', length=6)", 8, 2).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[6], [4]])
    for state in (None, module.init_state(2)):
        y = module(x, state, mask=mask)[0]
        for row, real in enumerate(mask):
            alone = module(x[row : row + 1, real])[0]
            torch.testing.assert_close(y[row : row + 1, real], alone, atol=1e-12, rtol=0)
