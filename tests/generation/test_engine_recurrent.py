"""Recurrent mixers in the decode engine: the steps, states and refusals of their modules."""

import math

import pytest
import torch
from test_engine import MODELS, decoder, double, needs_kernels, plain, run
from torch.utils import _pytree as pytree

import longspan
from longspan.attention.gla import GLA
from longspan.generation.native_decoder import Engine
from longspan.models import pretrained

pytestmark = needs_kernels

SPECS = [
    "gated_deltanet",
    "gated_deltanet(key_heads=1, expand_k=1.5, expand_v=1.0, convolution=0, gate=False, negative=True)",
    "gated_deltanet(key_heads=2, convolution=3); linear",
    "gated_deltanet(expand_k=0.5, convolution=6); softmax",
    "deltanet",
    "deltanet(convolution=0, negative=True); gla(rank=3, expand_v=1.5)",
    "kda",
    "kda(lower_bound=-5.0, convolution=0); retention(rotary=0.0, expand_v=1.0)",
    "gla",
    "retention",
    "ssd",
    "ssd(channels=5, key_heads=2, convolution=0); ssd(channels=18, convolution=3, expand_v=1.0)",
]


# With those of the other mixers.
ALL = pytest.mark.parametrize("spec", [*SPECS, *MODELS], ids=str)


def model(spec: str | tuple, dim: int = 64, heads: int = 4, **options):
    """A decoder of these mixers, or of a row of ``MODELS``."""
    if isinstance(spec, tuple):
        return decoder(spec, dim, heads)
    parts = {"positions": "none", "activation": "swiglu", "norm": "rms", "prenorm": True, "tied": False} | options
    return decoder((spec, *parts.values()), dim, heads, depth=2)


def close(found, expected):
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5 * largest, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_modules_in_double_precision(spec):
    own = model(spec)
    tokens = torch.randint(0, 37, (3, 50))
    expected, wanted = run(plain(double(own)), double(own).init_state(3, 50), tokens)
    found, state = run(Engine(own), own.init_state(3, 50), tokens)
    close(found, expected)
    for a, b in zip(pytree.tree_leaves(state), pytree.tree_leaves(wanted), strict=True):
        close(a, b)


@pytest.mark.whole
@pytest.mark.parametrize("spec", ["gated_deltanet", "kda", "ssd", "gla"])
@pytest.mark.parametrize("large", [1e2, 1e4])
def test_gates_of_which_the_exponential_overflows(spec, large):
    """The speeds are small, so that the decays are moderate."""
    own = model(f"gla(temperature={8 * large})" if spec == "gla" else spec)
    with torch.no_grad():
        for mixer in own.modules():
            if hasattr(mixer, "dt_bias"):
                mixer.dt_bias.fill_(large)
                mixer.a_log.fill_(-math.log(large) - 2)
            elif isinstance(mixer, GLA):
                mixer.decay[1].bias.fill_(-large)
    tokens = torch.randint(0, 37, (2, 6))
    expected, _ = run(plain(double(own)), double(own).init_state(2), tokens)
    found, _ = run(Engine(own), own.init_state(2), tokens)
    # The root mean square, as in ``test_head_dimensions_and_batches``.
    assert (found - expected).square().mean().sqrt() <= 1e-5 * expected.abs().max()


# Heads of 16, 18, 48 and 128 channels; every pair of a mixer, a size and a batch.
HEADS = [(64, 4), (72, 4), (192, 4), (256, 2)]
PAIRS = [(spec, *HEADS[j], (1, 3, 64)[(i + j) % 3]) for i, spec in enumerate(SPECS) for j in range(4)]


@pytest.mark.parametrize(("spec", "dim", "heads", "batch"), PAIRS)
@pytest.mark.full
def test_head_dimensions_and_batches(spec, dim, heads, batch):
    """The root mean square, since the norm of a head's output near 0 amplifies the rounding of a few of many rows."""
    own, twin = model(spec, dim, heads), double(model(spec, dim, heads))
    tokens = torch.randint(0, 37, (batch, 50 if batch < 64 else 20))
    expected, _ = run(plain(twin), twin.init_state(batch, 50), tokens)
    found, _ = run(Engine(own), own.init_state(batch, 50), tokens)
    assert (found - expected).square().mean().sqrt() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True, "norm": "layer", "activation": "gelu", "positions": "learned"},
        {"prenorm": False, "activation": "geglu", "positions": "sinusoidal"},
    ],
    ids=["tied, layer norm", "postnorm"],
)
def test_blocks_of_other_kinds(options):
    own = model(SPECS[0], **options)
    tokens = torch.randint(0, 37, (3, 20))
    expected, _ = run(plain(double(own)), double(own).init_state(3), tokens)
    found, _ = run(Engine(own), own.init_state(3), tokens)
    close(found, expected)


@ALL
def test_engine_and_modules_take_turns(spec):
    own = model(spec)
    engine, state, outputs = Engine(own), own.init_state(3), []
    tokens = torch.randint(0, 37, (3, 24))
    whole, _ = run(plain(own), own.init_state(3), tokens)
    for i, part in enumerate(tokens.split(4, 1)):
        out, state = run(engine if i % 2 else plain(own), state, part)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("spec", [*SPECS, MODELS[2]], ids=str)
def test_bfloat16_is_no_worse_than_the_modules(spec):
    half = model(spec).bfloat16()
    twin = double(half)
    tokens = torch.randint(0, 37, (3, 20))
    exact, _ = run(plain(twin), twin.init_state(3), tokens)
    worse, _ = run(plain(half), half.init_state(3), tokens)
    found, state = run(Engine(half), half.init_state(3), tokens)
    assert found.dtype == torch.bfloat16
    assert state.layers[0].sums.dtype == torch.float32
    assert (found.double() - exact).abs().max() <= (worse.double() - exact).abs().max()


@ALL
def test_threads_do_not_change_a_bit(spec):
    own, tokens, threads, found = model(spec, 192), torch.randint(0, 37, (5, 6)), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(pytree.tree_leaves(run(Engine(own), own.init_state(5, 6), tokens)))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_row_does_not_depend_on_the_others():
    own = model(SPECS[0])
    tokens = torch.randint(0, 37, (64, 5))
    state = own.init_state(64)
    for t in pytree.tree_leaves(state):
        if t.is_floating_point():
            t[1:] = float("nan")
    found, _ = run(Engine(own), state, tokens)
    alone, _ = run(Engine(own), own.init_state(1), tokens[:1])
    torch.testing.assert_close(found[:1], alone)
    assert found[1:].isnan().all()


def test_the_text_model_is_supported():
    text = pretrained.load("text").eval()
    assert Engine.why_not(text) == ""
    tokens = torch.tensor([list(b"The river ")])
    expected, _ = run(plain(double(text)), double(text).init_state(1), tokens)
    found, _ = run(Engine(text), text.init_state(1), tokens)
    close(found, expected)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda a: setattr(a, "query", torch.nn.Sequential(a.query)), "attention.query is a Sequential"),
            (lambda a: a.mix.register_forward_hook(print), "attention.mix has hooks"),
            (lambda a: a.norm.register_forward_hook(print), "attention.norm has hooks"),
            (lambda a: a.decay.append(torch.nn.Linear(64, 64)), "attention.decay is a Sequential"),
            (lambda a: a.out_gate.register_forward_hook(print), "attention.out_gate has hooks"),
        ],
    )
    def test_changed_parts(self, change, reason):
        own = model("kda")
        change(own.stack.blocks[1].attention)
        assert reason in Engine.why_not(own)

    def test_large_heads_and_interleaved_pairs(self):
        own = decoder(("gated_deltanet(expand_v=256.0)", *MODELS[0][1:]), 8, 1)
        assert "heads of more than 1024 channels" in Engine.why_not(own)
        assert "rotates interleaved pairs" in Engine.why_not(model("retention(rotary_layout='interleaved')"))

    @pytest.mark.parametrize("part", ["sums", "recent"])
    @pytest.mark.parametrize("spoil", [torch.Tensor.double, lambda t: t[:1], lambda t: t[..., :-1], lambda t: t[0]])
    def test_a_state_of_another_kind(self, part, spoil):
        own = model(SPECS[0])
        state = own.init_state(2)
        odd = state.layers[0]._replace(**{part: spoil(getattr(state.layers[0], part))})
        with pytest.raises(ValueError, match="the state does not fit this decoder"):
            Engine(own)(torch.zeros(2, 1, dtype=torch.long), state._replace(layers=(odd, state.layers[1])))

    def test_a_full_cache_of_fixed_capacity(self):
        own = model("softmax")
        state = longspan.states.fix_capacity(own.init_state(2, 4), 4)
        engine, token = Engine(own), torch.zeros(2, 1, dtype=torch.long)
        for _ in range(4):
            _, state = engine(token, state)
        kept = longspan.states.clone(state)
        with pytest.raises(ValueError, match="all 4 slots of the cache of fixed capacity are in use"):
            engine(token, state)
        assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(state), pytree.tree_leaves(kept), strict=True))
