"""The battery: every law for every example of every mechanism, and for a stack of two."""

import ast
from pathlib import Path

import pytest
import torch

import api_snapshot
import longspan
from longspan import testing
from longspan.attention import REGISTRY, Attention
from longspan.attention.linear import Linear
from longspan.models.config import StackConfig
from longspan.models.stacks import Stack
from longspan.states import nbytes

# Where a law may excuse errors as magnified roundings: denominators of few Fourier features come near zero, and a token
# between two clusters goes to the other one. All others are held to the fixed bounds.
EXCUSED = {("oracle", "fourier"), ("dtypes", "routing")}
EXCUSED |= {(law, spec) for law in ("oracle", "dtypes") for spec in ("rfa", "rfa(gate=True)")}
# In float32 these exceed 1e-5 by less than a factor of 4, in one gradient each. mesa: that of the first tokens, whose
# systems and norms magnify it. stick_breaking: that of the bias of its keys, a sum that nearly cancels. dsa: that of a
# weight of the indexer, whose norm has two channels.
EXCUSED |= {("oracle", spec) for spec in ("mesa", "stick_breaking")}
EXCUSED |= {("oracle", "dsa(keys=3, index_heads=1, index_dim=2, kv_heads=1, rotary=100.0)")}
# These take seconds each: by the default options every token meets hundreds of slots, which an example does at less
# cost; or a compiler follows every draw of queries, every level of a tree.
COSTLY = {(law, "reformer") for law in ("content", "mixed_rows", "oracle", "padding", "state")}
COSTLY |= {(law, "informer") for law in ("content", "dtypes", "mixed_rows", "oracle", "packed")}
COSTLY |= {(law, "infini") for law in ("content", "mixed_rows", "oracle")}
COSTLY |= {("oracle", "bp"), ("oracle", "bp(k=2)"), ("content", "linformer")}
COSTLY |= {(law, "informer(factor=1)") for law in ("adversarial", "compiles")}
COSTLY |= {(law, "bp(k=1, levels=2)") for law in ("blocks", "compiles")}
COSTLY |= {(law, "sac(edges=2)") for law in ("blocks", "compiles")}
COSTLY |= {("oracle", "rfa"), ("oracle", "rfa(gate=True)"), ("compiles", "linear; softmax"), ("content", "mesa")}
COSTLY |= {("oracle", "mesa"), ("oracle", "log_linear")}
# Mechanisms that take long to compile, in families with faster ones, and that are slow at a hundred thousand tokens.
LATE = {
    "compiles": """
        abc adaptive_span alibi axial bigbird compressive deltanet dsa etc fast_weights fourier image
        improved_clustered infini kda longformer log_linear longhorn lowrank_band mamba3 memory_compressed mlstm moba
        nystrom performer polynomial poolingformer power preconditioned_deltanet reformer relative retention sinkhorn
        sparse_transformer ssd star
    """.split(),
    "adversarial": ("adaptive_span", "bigbird", "fourier", "polynomial", "reformer"),
}
# Laws that the suite checks for one example of each mechanism: they take long, or fail for what other laws show of the
# other examples.
ONCE = ("compiles", "exports", "adversarial", "blocks", "content")
ONCE += ("additive", "arguments", "beginning", "dtypes", "rows_independent")
# Laws that the suite checks for bare names, whose options may be too large for windows: what the numbers are. Whether
# anything leaks, compiles or keeps its dtype depends on the mechanism, not on sizes.
PLAIN = ("oracle", "parallel_is_recurrent", "state", "gradients", "rebuilds")
# Laws that the fast tier checks, for the first example of each mechanism.
CHEAP = "causal parallel_is_recurrent padding packed arguments rebuilds carry cross bidirectional".split()


def cases():
    """Every law that applies, for every example and every bare name.

    The fast tier takes the cheap laws for the first example; what takes longest is marked slow for the others.
    """
    first = {longspan.mechanism_examples(name)[0] for name in longspan.list_mechanisms()}
    bare = [name for name in longspan.list_mechanisms() if name not in longspan.mechanism_examples(name)]
    specs = [*bare, "rfa(gate=True)", "linear; softmax"]
    for law, spec in [*testing.cases(), *((law, one) for one in specs for law in testing.applicable(one))]:
        late = law in ONCE and spec not in first and ";" not in spec
        late = late or (law, spec) in COSTLY or spec.split("(")[0] in LATE.get(law, ())
        late = late or (spec in bare and law not in PLAIN)
        marks = [pytest.mark.slow] if late else []
        yield pytest.param(law, spec, marks=marks + ([] if law in CHEAP and spec in first else [pytest.mark.full]))


@pytest.mark.whole
@pytest.mark.parametrize(("law", "spec"), list(cases()))
def test_law(law, spec):
    row = testing.check(law, spec)
    assert row.status in ("passed", "exempt"), row.note
    assert not row.excused or (law, spec) in EXCUSED, row.excused


@pytest.mark.parametrize("name", longspan.list_mechanisms())
def test_new_parameters_are_in_their_range(name):
    """Training calls ``project`` after each step."""
    module = longspan.build(name, dim=12, heads=2, causal="causal" in REGISTRY[name].directions)
    before = [p.clone() for p in module.parameters()]
    module.project()
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", longspan.list_mechanisms())
def test_calls_with_a_mask_or_a_state_are_traced_with_their_gradients(name, monkeypatch):
    monkeypatch.setattr(testing.software, "TRACER", "aot_eager")
    row = testing.check("compiles", longspan.mechanism_examples(name)[0])
    assert row.status != "failed", row.note


# Mechanisms whose states keep something of every token.
GROWING = """
    alibi axial bigbird dsa exact_topk forgetting gaussian informer kernel lowrank_band memory_compressed moba nsa path
    realformer relative sac sinkhorn softmax sparse_transformer stick_breaking synthesizer talking_heads
""".split()


@pytest.mark.parametrize("name", [name for name in longspan.list_mechanisms() if "causal" in REGISTRY[name].directions])
def test_a_state_grows_only_where_tokens_are_kept(name):
    module = longspan.build(longspan.mechanism_examples(name)[0], 8, 2)
    few, many = (nbytes(module(torch.randn(1, n, 8), module.init_state(1))[1]) for n in (3, 90))
    assert (few < many) == (name in GROWING)


@pytest.mark.parametrize("name", api_snapshot.kept())
def test_facts_and_options_are_frozen(name):
    """Facts decide which laws apply, so a false fact would hide a law; and an option is a cost."""
    assert api_snapshot.facts()[name] == api_snapshot.kept()[name], "if it is meant: python tests/api_snapshot.py"


def test_the_frozen_facts_are_as_their_script_writes_them():
    assert api_snapshot.written(api_snapshot.kept()) == api_snapshot.FILE.read_text(encoding="utf-8")


def test_every_mechanism_class_can_be_imported():
    """By its name at run time, and by an import that type checkers see."""
    source = ast.parse(Path(longspan.attention.__file__).read_text(encoding="utf-8"))
    shown = {a.asname for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for a in node.names if a.asname}
    own = {cls for cls in REGISTRY.values() if cls.__module__.startswith("longspan.")}
    assert {cls.__name__ for cls in own} == shown
    for cls in own:
        assert getattr(longspan.attention, cls.__name__) is cls
        assert cls.__name__ in dir(longspan.attention)
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from longspan.attention import Nothing  # noqa: F401  # type: ignore[attr-defined]


def test_an_exemption_is_strict(monkeypatch):
    monkeypatch.setattr(REGISTRY["linear"], "exempt", {"causal": "not really"})
    row = testing.check("causal", "linear")
    assert row.status == "failed"
    assert "remove the exemption" in row.note


def test_an_exemption_excuses_a_law_that_fails(monkeypatch):
    monkeypatch.setattr(REGISTRY["linear"], "exempt", {"causal": "leaks for the test"})
    monkeypatch.setattr(torch.Tensor, "tril", lambda products: products)
    assert testing.check("causal", "linear").status == "exempt"


def test_check_attention_raises_with_its_report(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "tril", lambda products: products)
    monkeypatch.setattr(testing, "_LAWS", {"causal": testing._LAWS["causal"]})
    with pytest.raises(AssertionError, match="causal +failed.*outputs before token 1: differ by"):
        testing.check_attention("linear")
    assert not testing.check_attention("linear", raises=False).ok


def test_unknown_laws_and_mechanisms_are_refused():
    with pytest.raises(ValueError, match="unknown law 'causality'; known: causal, beginning"):
        testing.check("causality", "linear")
    with pytest.raises(
        ValueError, match=r"unknown attention 'linaer' \(did you mean 'linear'\?\); known: .*kernel, .*linear"
    ):
        testing.check("causal", "linaer")


class TestRegistry:
    def test_a_name_is_taken_once(self):
        with pytest.raises(ValueError, match="two attentions are named 'linear'"):
            type("Other", (Attention,), {"name": "linear", "__doc__": "Another.", "__module__": __name__})

    def test_facts_are_required(self):
        with pytest.raises(TypeError, match=r"Bare needs paper, citation, cost, a docstring"):
            type("Bare", (Attention,), {"name": "bare", "__module__": __name__})

    def test_arguments_of_attend_are_known(self):
        def attend(self, x, state, *, masks=None):
            return x, state

        facts = {"name": "odd", "paper": "", "citation": ("", "", 0), "cost": "N", "__doc__": "Odd.", "attend": attend}
        with pytest.raises(ValueError, match=r"unknown argument of Odd.attend 'masks' \(did you mean 'mask'\?\)"):
            type("Odd", (Attention,), facts)

    def test_directions_are_refused_at_build(self, monkeypatch):
        monkeypatch.setattr(REGISTRY["linear"], "directions", ("bidirectional",))
        with pytest.raises(ValueError, match="linear has no causal form; it has: bidirectional"):
            longspan.build("linear", 8, 2)


class TestBuild:
    def test_rotary_needs_even_heads(self):
        with pytest.raises(ValueError, match="even head dimension, not 3"):
            longspan.build("linear(rotary=10.0)", 6, 2)


class TestArguments:
    """The messages; that wrong arguments are refused at all is the law ``arguments``."""

    linear = longspan.build("linear", 8, 2)
    x = torch.zeros(2, 5, 8)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"mask": torch.ones(2, 5)},
                r"mask must be bool \(2, 5\), True on real tokens, not torch.float32 \(2, 5\)",
            ),
            ({"segments": torch.ones(2, 5)}, r"segments must be int64 \(2, 5\), one id per token, not torch.float32"),
            ({"segments": torch.tensor([[0] * 5, [1, 1, 0, 0, 0]])}, "segments must never decrease along a row; row 1"),
            ({"context": torch.zeros(2, 3, 7)}, r"context must be \(2, M, 8\), not torch.float32 \(2, 3, 7\)"),
            ({"context": torch.zeros(2, 3, 8).double()}, "context is torch.float64 and x is torch.float32"),
            ({"context_mask": torch.ones(2, 3).bool()}, "context_mask= needs context="),
            ({"carry": 1}, "linear does not support carry=; it supports: context, context_mask, donate, mask, prefix"),
            ({"record": 1}, "record must be a dict to write into, not int"),
            ({"donate": True}, "donate=True needs a state"),
            (
                {"state": (1,)},
                "builtins.tuple; its states are linear.LinearState, linear.LinearRotaryState",
            ),
        ],
    )
    def test_message(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            self.linear(self.x, **arguments)

    def test_x(self):
        with pytest.raises(ValueError, match=r"x must be floating-point \(B, N, 8\), not torch.float32 \(2, 5, 7\)"):
            self.linear(self.x[..., :7])
        with pytest.raises(ValueError, match="x is torch.float64 and the weights are torch.float32"):
            self.linear(self.x.double())

    def test_states(self):
        state = self.linear.init_state(3)
        with pytest.raises(ValueError, match="state is for 3 sequences, x has 2"):
            self.linear(self.x, state)
        with pytest.raises(ValueError, match=r"shape \(2, 4, 2, 3\), but linear with dim=8, heads=2 needs"):
            self.linear(self.x, longspan.build("linear", 8, 4).init_state(2))
        with pytest.raises(ValueError, match="softmax cannot continue linear.LinearState"):
            longspan.build("softmax", 8, 2)(self.x, self.linear.init_state(2))
        with pytest.raises(ValueError, match="a bidirectional linear sees whole sequences"):
            longspan.build("linear", 8, 2, causal=False)(self.x, self.linear.init_state(2))
        with pytest.raises(ValueError, match="donate=True overwrites the state, which gradients still need"):
            self.linear(self.x, self.linear.init_state(2), donate=True)
        with pytest.raises(ValueError, match="batch=-1 and capacity=None must not be negative"):
            self.linear.init_state(-1)

    def test_cross_states(self):
        _, state = self.linear(self.x, context=self.x)
        with pytest.raises(ValueError, match="context= and state"):
            self.linear(self.x, state, context=self.x)
        with pytest.raises(ValueError, match="segments= .* state of cross attention"):
            self.linear(self.x, state, segments=torch.zeros(2, 5, dtype=torch.long))
        with pytest.raises(ValueError, match="segments= and context="):
            self.linear(self.x, context=self.x, segments=torch.zeros(2, 5, dtype=torch.long))
        with pytest.raises(ValueError, match="rotary positions relate tokens of one sequence"):
            longspan.build("linear(rotary=10.0)", 8, 2)(self.x, context=self.x)


def test_a_custom_feature_map():
    assert Linear(8, 2, feature_map=torch.relu).phi(-torch.ones(4)).tolist() == [0] * 4
    with pytest.raises(ValueError, match="feature map 'tanh' reaches -1"):
        Linear(8, 2, feature_map=torch.tanh)


@pytest.fixture
def counter():
    """A mechanism that hands on how many layers there were below it, and adds that to its output."""

    class Counter(Attention):
        """Counts layers."""

        name, paper, cost = "counter", "0000.00000", "N"
        citation, directions, has_layer_carry = ("Nobody", "Nothing", 2000), ("bidirectional",), True

        def init_carry(self, x, mask):
            return 0

        def attend(self, x, state, *, mask=None, segments=None, carry=None):
            y = x * 0 + (carry or 0)
            return (y, state) if carry is None else (y, state, carry + 1)

    yield Counter
    del REGISTRY["counter"]


def test_a_stack_passes_carries_from_layer_to_layer(counter):
    stack = Stack(StackConfig(dim=4, depth=5, heads=1, feedforward=4, attention="counter; linear"), causal=False)
    seen, handed = [], []
    for attention in stack.attentions():
        attention.register_forward_hook(lambda module, _, out: seen.append((module.name, len(out))))
        attention.register_forward_hook(lambda module, _, out: handed.append(out[2]) if len(out) == 3 else None)
    stack(torch.randn(2, 3, 4))
    assert handed == [1, 2, 3]
    assert seen == [("counter", 3), ("linear", 2), ("counter", 3), ("linear", 2), ("counter", 3)]


def test_the_law_of_carrying(counter):
    assert testing.check("carry", "counter").status == "passed"

    def ignorant(self, x, state, *, mask=None, segments=None, carry=None):
        return (x * 0, state) if carry is None else (x * 0 + 1, state, carry)

    counter.attend = ignorant
    assert testing.check("carry", "counter").status == "failed"
    with pytest.raises(ValueError, match="linear has no carry"):
        longspan.build("linear", 8, 2).init_carry(torch.zeros(1, 1, 8), None)
