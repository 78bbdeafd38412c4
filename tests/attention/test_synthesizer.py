"""Synthesized scores against loops: their sources, the used part of the tables, and the largest length."""

import pytest
import torch

import longspan
from longspan.states import nbytes
from longspan.states.kv_cache import KeyValues
from support.hand import plain, read
from support.tensors import data

KINDS = ("dense", "random", "factored_dense", "factored_random")
MIXTURES = (
    "random+dense",
    "factored_random+dot",
    "factored_dense+random",
    "dot+factored_dense+dense+factored_random+random",
)
N = 11
NETWORKS = (("hidden", ".weight"), ("hidden", ".bias"), ("outputs", ""), ("offsets", ""))
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 7, [2] * 11])


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


def row(module, x, kind, i, keys, at):
    """Scores of token i of x (N,dim) at positions ``at`` for some keys: (H, keys), by the mixture's definition."""
    parts = []
    for part in kind.split("+"):
        if part == "dot":
            q, k = module.query(x[i]).view(module.heads, -1), module.key(x[keys]).unflatten(-1, (module.heads, -1))
            parts.append(torch.einsum("hd,mhd->hm", q, k) / q.shape[-1] ** 0.5)
        else:
            parts.append(table(module, x[i], part)[:, at[i]][:, [at[j] for j in keys]])
    if len(parts) == 1:
        return parts[0]
    shares = module.mixture.exp() / module.mixture.exp().sum()
    return torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)


def loops(module, x, kind, at, allowed):
    """Row by row: x (B,N,dim), at and allowed lists of positions and of keys -> (B,N,dim)."""
    v = module.value(x).unflatten(-1, (module.heads, -1))
    out = torch.zeros_like(v)
    for b in range(len(x)):
        for i in range(x.shape[1]):
            keys = allowed[b, i].nonzero().flatten()
            if len(keys):
                s = row(module, x[b], kind, i, keys, at[b])
                out[b, i] = torch.einsum("hj,jhe->he", s.softmax(-1), v[b, keys])
    return module.out(out.flatten(-2))


def test_by_hand():
    """A learned table, whatever the tokens: weights 1; 1 and 3; 1, 1 and 2."""
    module = plain("synthesizer(kind='random', length=3)")
    module.table.data = torch.tensor([[[1.0, 9.0, 9.0], [1.0, 3.0, 9.0], [1.0, 1.0, 2.0]]]).double().log()
    assert read(module, 1.0, 2.0, 4.0) == pytest.approx([1.0, 7 / 4, 11 / 4])


@pytest.mark.parametrize("kind", KINDS + MIXTURES)
@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_loops(kind, causal):
    module, x, plain = build(kind, causal=causal), data(2, N, 6), [list(range(N))] * 2
    everything = torch.ones(2, N, N, dtype=torch.bool)
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    cases = (
        ({}, plain, everything),
        ({"mask": MASK}, [[0, 1, 2, 0, 0, 3, 4, 5, 6, 7, 8], [0, *range(10)]], everything & MASK[:, None, :]),
        ({"segments": SEGMENTS}, [[*range(4), *range(7)], plain[1]], same),
    )
    for arguments, at, allowed in cases:
        real = arguments.get("mask", torch.ones_like(MASK))
        expected = loops(module, x, kind, at, allowed.tril() if causal else allowed)
        found = module(x, **arguments)[0]
        torch.testing.assert_close(found[real], expected[real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["random", "factored_random"])
def test_equal_scores_give_the_mean_so_far(kind):
    """As in ``average``: each token reads the mean of the values so far."""
    module, x = build(kind), data(2, N, 6)
    torch.nn.init.zeros_(module.table if kind == "random" else module.rows)
    means = module.value(x).cumsum(1) / torch.arange(1, N + 1)[:, None]
    torch.testing.assert_close(module(x)[0], module.out(means), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_weights_depends_on_its_own_token_or_on_none(kind):
    module, x = build(kind), data(2, N, 6).requires_grad_()
    record = {}
    module(x, record=record)
    if kind.endswith("random"):
        (found,) = torch.autograd.grad(record["matrix"].square().sum(), x, allow_unused=True)
        assert found is None
        return
    for i in range(1, N):
        (found,) = torch.autograd.grad(record["matrix"][:, :, i].square().sum(), x, retain_graph=True)
        assert found[:, i].abs().max() > 0
        assert not found[:, :i].any()
        assert not found[:, i + 1 :].any()


@pytest.mark.parametrize("kind", ["dense", "random", "factored_random", "dense+dot+random+factored_random"])
def test_only_the_rows_and_columns_of_a_sequence_are_used(kind):
    """Weights for longer sequences, cut down to fewer rows and columns, give the same."""
    long, short, x = build(kind, length=29), build(kind), data(2, N, 6)
    cut = {"table": (slice(None), slice(N), slice(N))} | dict.fromkeys(("rows", "columns"), (slice(None), slice(N)))
    cut |= dict.fromkeys(("outputs.0", "offsets.0"), (slice(None), slice(None), slice(N)))
    short.load_state_dict({name: w[cut[name]] if name in cut else w for name, w in long.state_dict().items()})
    for causal in (True, False):
        long.causal = short.causal = causal
        torch.testing.assert_close(long(x)[0], short(x)[0], rtol=1e-10, atol=1e-10)


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

    @pytest.mark.parametrize("kind", KINDS + MIXTURES)
    def test_longer_sequences_raise_when_compiled(self, kind):
        torch._dynamo.reset()
        module = torch.compile(build(kind, length=5), backend="eager", fullgraph=True)
        with pytest.raises((RuntimeError, IndexError), match="out of (bounds|range)"):
            module(data(2, 6, 6))

    @pytest.mark.parametrize("kind", KINDS + MIXTURES)
    def test_padding_and_other_segments_do_not_count(self, kind):
        module, x = build(kind, length=8), data(2, N, 6)
        mask = MASK.clone()
        mask[:, 4:6] = mask[:, 8:9] = False
        alone = module(x[:1, mask[0]])[0]
        torch.testing.assert_close(module(x, mask=mask)[0][:1, mask[0]], alone, rtol=1e-10, atol=1e-10)
        segments = torch.tensor([[0] * 4 + [1] * 7, [0] * 8 + [5] * 3])
        y = module(x, segments=segments)[0]
        torch.testing.assert_close(y[:1, 4:], module(x[:1, 4:])[0], rtol=1e-10, atol=1e-10)


def test_the_state_has_only_values():
    module = build("dense", length=13)
    state = module.init_state(2, 7)
    assert nbytes(state) == 2 * 7 * 6 * 8 + 2 * 8
    assert module.init_state(2, 100).values.shape == (2, 2, 13, 3)  # the largest length


class TestMixture:
    def test_shares_are_equal_at_first_and_learn(self):
        module, x = longspan.build("synthesizer(kind='random+dense+dot', length=13)", 6, 2).double(), data(2, N, 6)
        assert module.mixture.softmax(0).tolist() == pytest.approx([1 / 3] * 3)
        module(x)[0].square().sum().backward()
        assert (module.mixture.grad != 0).all()
        assert module.mixture.grad.sum().abs() < 1e-10  # adding a constant to all kinds changes no share

    @pytest.mark.parametrize("kind", MIXTURES)
    def test_with_a_share_of_one_it_is_that_kind_alone(self, kind):
        module, x = build(kind), data(2, N, 6)
        for number, part in enumerate(kind.split("+")):
            torch.nn.init.constant_(module.mixture, -1e9)
            torch.nn.init.zeros_(module.mixture[number])
            alone = longspan.build("softmax", 6, 2).double() if part == "dot" else build(part)
            weights = module.state_dict()
            if part == "factored_dense" and "dense" in kind.split("+"):
                weights |= {
                    f"{name}.{i}{end}": module.state_dict()[f"{name}.{i + 1}{end}"]
                    for i in (0, 1)
                    for name, end in NETWORKS
                }
            alone.load_state_dict({name: weights[name] for name in alone.state_dict()})
            torch.testing.assert_close(module(x)[0], alone(x)[0], rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("kind", MIXTURES)
    def test_the_state_has_keys_only_for_dot(self, kind):
        module, dot = build(kind, length=13), "dot" in kind
        _, state = module(data(2, 7, 6), module.init_state(2, 7))
        assert isinstance(state, KeyValues) == dot
        assert nbytes(module.init_state(2, 7)) == nbytes(state) == (1 + dot) * 2 * 7 * 6 * 8 + 2 * 8
        other = build("dense" if dot else "dense+dot").init_state(2)
        with pytest.raises(ValueError, match="synthesizer cannot continue .*; its states are "):
            module(data(2, 7, 6), other)


def test_weights_of_single_kinds_keep_their_names():
    networks = {f"{name}.0{end}" for name, end in NETWORKS}
    names = {
        "dense": networks,
        "random": {"table"},
        "factored_dense": networks | {name.replace("0", "1") for name in networks},
        "factored_random": {"rows", "columns"},
    }
    for kind, own in names.items():
        ends = {f"{part}.{end}" for part in ("value", "out") for end in ("weight", "bias")}
        assert set(build(kind).state_dict()) == own | ends


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
