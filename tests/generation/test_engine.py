"""The decode engine: the decoder's own answers and states, and what it cannot serve it does not touch."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import longspan
from longspan import backend
from longspan.generation.native_decoder import Engine
from longspan.generation.sampling import generate
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.ops.native import build

try:
    build.load("decode/step")
    REASON = ""
except build.Unavailable as error:
    REASON = str(error)
needs_kernels = pytest.mark.skipif(bool(REASON), reason=f"no native kernels here: {REASON}")
pytestmark = needs_kernels

# attention, positions, activation, norm, prenorm, tied
MODELS = [
    ("linear", "learned", "gelu", "layer", True, False),
    ("softmax", "sinusoidal", "relu", "rms", True, True),
    ("linear; softmax(kv_heads=2)", "rotary", "swiglu", "layer", False, False),
    ("linear(feature_map='exp'); softmax", "none", "geglu", "rms", False, True),
    ("linear(feature_map='squared_relu', eps=0.01)", "rotary", "squared_relu", "layer", True, False),
    ("linear(feature_map='relu', eps=0.01); softmax(kv_heads=1)", "learned", "silu", "layer", True, False),
]


def decoder(row=MODELS[0], dim=24, heads=4, seed=0, **options) -> Decoder:
    torch.manual_seed(seed)
    named = dict(zip(("attention", "positions", "activation", "norm", "prenorm", "tied"), row, strict=True))
    options = {"depth": 3, "feedforward": dim + 13, "vocab": 37, "length": 128} | named | options
    model = Decoder(DecoderConfig(dim=dim, heads=heads, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def double(model: Decoder) -> Decoder:
    twin = Decoder(model.config).double().eval()
    twin.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    return twin


def run(step, state, tokens):
    outputs = []
    for token in tokens.split(1, 1):
        out, state = step(token, state)
        outputs.append(out)
    return torch.cat(outputs, 1), state


def plain(model):
    @torch.no_grad()
    def step(token, state):
        return model(token, state, donate=True)

    return step


# Each model in two of three sizes.
SIZES = [(24, 1), (64, 7), (136, 53)]


@pytest.mark.parametrize(
    ("row", "dim", "batch"), [(row, *SIZES[(i + j) % 3]) for i, row in enumerate(MODELS) for j in range(2)], ids=str
)
def test_equals_the_decoder_in_double_precision(row, dim, batch):
    model, steps = decoder(row, dim), 79
    tokens = torch.randint(0, 37, (batch, steps))
    expected, _ = run(plain(double(model)), double(model).init_state(batch, steps), tokens)
    found, state = run(Engine(model), model.init_state(batch, steps), tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    assert state.position.tolist() == [steps] * batch


def test_rows_of_different_lengths():
    """Ragged prompts leave caches of unequal lengths; each row goes on as if alone."""
    model = decoder(MODELS[2])
    prompt = torch.randint(0, 37, (3, 9))
    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5, [False] * 7 + [True] * 2])
    with torch.no_grad():
        _, state = model(prompt, model.init_state(3), mask=mask)
        tokens = torch.randint(0, 37, (3, 11))
        expected, _ = run(plain(model), longspan.states.clone(state), tokens)
    found, _ = run(Engine(model), longspan.states.clone(state), tokens)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_a_full_cache_grows():
    model = decoder(MODELS[1])
    tokens = torch.randint(0, 37, (2, 9))
    expected, _ = run(Engine(model), model.init_state(2, 9), tokens)
    found, state = run(Engine(model), model.init_state(2, 1), tokens)
    assert torch.equal(found, expected)
    assert state.layers[0].keys.shape[2] == 16


def test_generate_uses_it_and_draws_the_same(monkeypatch):
    model, calls = decoder(MODELS[2]), []
    real = Engine.__call__
    monkeypatch.setattr(Engine, "__call__", lambda self, *given: calls.append(1) or real(self, *given))
    prompt = torch.randint(0, 37, (3, 5))
    found = generate(model, prompt, max_new_tokens=20, seed=1)
    assert len(calls) == 19
    with backend("torch"):
        expected = generate(model, prompt, max_new_tokens=20, seed=1)
    assert len(calls) == 19
    assert torch.equal(found, expected)


def test_the_weights_are_those_of_its_making():
    model = decoder()
    engine, token = Engine(model), torch.zeros(1, 1, dtype=torch.long)
    before, _ = engine(token, model.init_state(1))
    with torch.no_grad():
        model.head.weight.zero_()
    again, _ = engine(token, model.init_state(1))
    assert torch.equal(before, again)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda m: m.double(), "on the CPU, all float32 or all bfloat16"),
            (lambda m: m.head.bfloat16(), "on the CPU, all float32 or all bfloat16"),
            (lambda m: m.stack.blocks[1].attention.register_forward_hook(print), "stack.blocks.1.attention has "),
            (lambda m: setattr(m, "head", nn.Sequential(m.head)), "head is a Sequential"),
            (lambda m: nn.utils.parametrizations.weight_norm(m.head), "head is a ParametrizedLinear"),
            (lambda m: setattr(m.stack.blocks[0].attention, "feature_map", torch.sigmoid), "map is a Python callable"),
        ],
    )
    def test_a_changed_decoder(self, change, reason):
        model = decoder()
        change(model)
        assert reason in Engine.why_not(model)
        with pytest.raises(ValueError, match="does not support this decoder: "):
            Engine(model)

    def test_dropout_and_other_mechanisms_and_backends(self):
        model = decoder(dropout=0.1)
        assert Engine.why_not(model) == ""
        assert "dropout is active" in Engine.why_not(model.train())
        assert "dropout is active" in Engine.why_not(decoder(("softmax(dropout=0.1)", *MODELS[0][1:])).train())
        assert "is a Kernel" in Engine.why_not(decoder(("kernel", *MODELS[0][1:])))
        with backend("torch"):
            assert Engine.why_not(decoder()) == "another backend is forced"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert Engine.why_not(decoder()) == "autocast is on"

    def test_tokens_and_positions_out_of_range(self):
        model = decoder(length=8)
        engine, state = Engine(model), model.init_state(2)
        with pytest.raises(ValueError, match="tokens .* 0 to 38; .* 0 to 37"):
            engine(torch.tensor([[0], [38]]), state)
        with pytest.raises(ValueError, match="tokens must be int64"):
            engine(torch.zeros(2, 2, dtype=torch.long), state)
        assert all(not layer.sums.any() for layer in state.layers)
        _, state = run(engine, state, torch.zeros(2, 8, dtype=torch.long))
        with pytest.raises(ValueError, match="position 8 is beyond the table of 8"):
            engine(torch.zeros(2, 1, dtype=torch.long), state)

    @pytest.mark.parametrize(
        "other",
        [
            lambda: decoder(MODELS[1]).init_state(2, 4),
            lambda: decoder(dim=48).init_state(2),
            lambda: decoder(depth=2).init_state(2),
            lambda: decoder(heads=2).init_state(2),
            lambda: decoder().double().init_state(2),
            lambda: decoder(MODELS[4]).init_state(2),
        ],
    )
    def test_a_state_of_another_decoder(self, other):
        with pytest.raises(ValueError, match="the state does not fit this decoder"):
            Engine(decoder())(torch.zeros(2, 1, dtype=torch.long), other())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("row", MODELS[:2])
def test_the_default_type_of_the_process_is_not_the_engines(row, default):
    model, tokens = decoder(row), torch.tensor([[3], [1]])
    wanted, _ = Engine(model)(tokens, model.init_state(2))
    torch.set_default_dtype(default)
    try:
        found, _ = Engine(model)(tokens, model.init_state(2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned", "rotary"])
def test_neither_training_nor_its_mode_reaches_the_engine(positions):
    model, tokens = decoder(("linear", positions, "gelu", "layer", True, False), dropout=0.5), torch.tensor([[3], [1]])
    engine = Engine(model)
    wanted, _ = engine(tokens, model.init_state(2))
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    found, _ = engine(tokens, model.init_state(2))
    assert torch.equal(found, wanted)


def test_a_backward_pass_through_an_overwritten_state_raises():
    model, tokens = decoder(), torch.tensor([[3], [1]])
    state = model.init_state(2)
    out, _ = model(torch.tensor([[3, 1], [1, 4]]), state)
    Engine(model)(tokens, state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Interrupting(torch.Tensor):
    """Tokens that run something else while a call looks at them, as a switch of threads may."""

    @property
    def is_cpu(self) -> bool:
        self.meanwhile()
        return True


@pytest.mark.parametrize("row", MODELS[:3], ids=lambda row: row[0])
def test_another_thread_in_the_middle_of_a_call(row):
    model = decoder(row, depth=2)
    engine, token = Engine(model), torch.ones(2, 1, dtype=torch.long)
    _, first = engine(token, model.init_state(2, 4))
    _, second = engine(2 * token, model.init_state(2, 4))
    wanted = [engine(token, longspan.states.clone(state))[0] for state in (first, second)]
    _, first = engine(token, model.init_state(2, 4))
    found = []

    def meanwhile():
        with ThreadPoolExecutor(1) as other:
            found.append(other.submit(lambda: engine(token, second)[0]).result())

    interrupting = token.as_subclass(Interrupting)
    interrupting.meanwhile = meanwhile
    found.insert(0, engine(interrupting, first)[0])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("row", MODELS[:3], ids=lambda row: row[0])
def test_threads_share_an_engine(row):
    """Each thread has its own states, and gets the numbers of a thread that is alone, to the last bit."""
    model = decoder(row, depth=2)
    engine = Engine(model)
    tokens = torch.randint(0, 37, (8, 1, 12), generator=torch.Generator().manual_seed(0))
    alone = [run(engine, model.init_state(1, 2), row) for row in tokens]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda i: run(engine, model.init_state(1, 2), tokens[i % 8]), range(64)))
    finally:
        sys.setswitchinterval(before)
    for i, (outputs, state) in enumerate(found):
        wanted = pytree.tree_leaves(alone[i % 8])
        assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves((outputs, state)), wanted, strict=True))
