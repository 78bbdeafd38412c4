"""What a spec or a config may take: refused before memory is taken, with the memory that it would take."""

import functools
import subprocess
import sys

import pytest
import torch

import longspan
from longspan import DecoderConfig, EncoderConfig, StackConfig, patterns
from longspan._utils import model_memory
from longspan.attention import REGISTRY
from longspan.attention.base import own_options
from longspan.attention.build import make
from longspan.models import likelihood
from longspan.models.decoder import Decoder
from longspan.models.encoder import Encoder
from longspan.models.stacks import Stack


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "synthesizer(kind='random', length=100000000)",
            "weights of .synthesizer.* with dim=12 would take .* TiB of memory",
        ),
        ("etc(globals=1000000000)", "would take .* GiB of memory; this machine has"),
        ("kda(convolution=1000000000000)", "would take .* of memory; this machine has"),
        ("ssd(channels=4611686018427387904)", "no tensor can have the sizes"),
        ("ssd(channels=9223372036854775807)", "no tensor can have the sizes"),
        ("performer(features=100000000)", "features=100000000 must be at most 1000000"),
        ("star(cycles=2147483648)", "cycles=2147483648 must be from 1 to 1000"),
        ("sparse(pattern='random(100000000)')", "keys=100000000 must be at most 1024"),
        (
            "sparse(pattern='band(99999999999999999999999)')",
            "band: left=9{23} must be a whole number, finite and within",
        ),
    ],
)
def test_an_attention_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        longspan.build(text, 12, 4, causal=not text.startswith(("star", "etc")))


@pytest.mark.parametrize("name", longspan.list_mechanisms())
def test_every_option_has_a_kind_and_is_checked_by_hand_too(name):
    """Options of another type raise an error with their name, however a mechanism is built."""
    cls = REGISTRY[name]
    causal = "causal" in cls.directions
    for option, parameter in own_options(cls).items():
        assert parameter.annotation is not parameter.empty, option
        with pytest.raises(ValueError, match=rf"^{name}: {option}=.* must be "):
            cls(12, 4, causal=causal, **{option: [object()]})
    with pytest.raises(ValueError, match=f"{name}: dim=12.0 must be a whole number"):
        cls(12.0, 4, causal=causal)


def test_an_attention_without_annotations_is_refused():
    with pytest.raises(TypeError, match="Bare needs an annotation of window"):

        class Bare(longspan.Attention):
            """Nothing."""

            name, paper, cost, citation = "bare", "0", "0", ("", "", 0)

            def __init__(self, dim: int, heads: int, *, causal: bool = True, window=3):
                super().__init__(dim, heads, causal=causal)


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (
            Decoder,
            DecoderConfig(dim=1_000_000),
            "weights of dim=1000000, feedforward=1024, depth=4 would take .* TiB of memory",
        ),
        (
            Decoder,
            DecoderConfig(depth=10_000, feedforward=1 << 20),
            "depth=10000 would take .* TiB of memory; this machine has",
        ),
        (Decoder, DecoderConfig(vocab=1 << 39), "would take .* TiB of memory"),
        (Decoder, DecoderConfig(likelihood="logistics(mixtures=9223372036854775807)"), "no tensor can have the sizes"),
        (Encoder, EncoderConfig(length=1 << 62, positions="learned"), "no tensor can have the sizes"),
        (Stack, StackConfig(feedforward=1 << 44), "would take .* TiB of memory"),
    ],
)
def test_a_model_is_refused_before_it_takes_memory(make, config, message):
    with pytest.raises(ValueError, match=message):
        make(config)


def test_what_is_weighed_is_what_is_built(monkeypatch):
    """A model is built with exactly its bytes, not with one less; the random generator does not move."""
    config = DecoderConfig(dim=16, depth=5, heads=2, attention="linear; softmax(kv_heads=1); linear", feedforward=24)
    torch.manual_seed(0)
    decoder = Decoder(config)
    after = torch.get_rng_state()
    size = model_memory.nbytes(decoder)
    # Of three specs over five layers one round is counted, and two thirds of it.
    uneven = model_memory.nbytes(decoder.stack.blocks[1]) - model_memory.nbytes(decoder.stack.blocks[0])
    assert abs(uneven) < size / 50
    monkeypatch.setattr(model_memory, "memory", lambda: size + abs(uneven))
    torch.manual_seed(0)
    again = Decoder(config)
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))
    monkeypatch.setattr(model_memory, "memory", lambda: size - abs(uneven) - 1)
    with pytest.raises(ValueError, match="of memory; this machine has"):
        Decoder(config)
    with torch.device("meta"):
        Decoder(config)


def test_patterns_of_any_size_take_no_memory():
    """Numbers far beyond a sequence cost what the sequence costs."""
    for text, same in (
        ("globals(100000000)", "everywhere"),
        ("band(1000000000)", "causal"),
        ("strided(1000000000) & causal", "band(0)"),
        ("block(1000000000)", "everywhere"),
        ("local2d((2, 2), (100000000, 100000000), 6)", "local2d((2, 2), (40, 40), 6)"),
    ):
        one, other = patterns.parse(text), patterns.parse(same)
        n = 48
        assert torch.equal(one.dense(n), other.dense(n)), text
        listed = [pattern.blocks(n, 16) for pattern in (one, other)]
        assert torch.equal(*(blocks.index.sort(1).values for blocks in listed)), text
    assert patterns.parse("band(1000000000) & strided(3)").lookback == 999_999_999
    assert patterns.parse("band(1000000000) & dilated(2, 5)").lookback == 10


def test_nested_patterns_take_time_that_grows_evenly():
    text = "globals(2)"
    for _ in range(55):
        text = f"(band(3) - {text})"
    assert patterns.parse(text).lookback == 3
    assert patterns.parse("by_head(" * 55 + "band(3)" + ")" * 55).lookback == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("logistics(mixtures=True)", "logistics: mixtures=True must be a whole number"),
        ("logistics(mixtures=1e9)", "logistics: mixtures=1000000000.0 must be a whole number"),
    ],
)
def test_a_likelihood_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        likelihood.build(text, 17)
    with pytest.raises(ValueError, match="mixtures=True must be a whole number"):
        likelihood.Logistics(17, mixtures=True)


@pytest.mark.parametrize("name", REGISTRY)
def test_shapes_are_those_of_the_weights(name):
    causal = "causal" in REGISTRY[name].directions
    made = functools.partial(make, name, 32, 2, causal=causal, layer=0, depth=1, positions="none")
    both = (one.state_dict().items() for one in (model_memory.shapes(made), made()))
    looks = [{name: (t.shape, t.dtype) for name, t in items} for items in both]
    assert looks[0] == looks[1]


def test_no_compiler_is_imported_to_build_a_model():
    names = " ".join(name for name, one in REGISTRY.items() if "causal" in one.directions)
    code = (
        "import sys, longspan\n"
        f"for name in {names!r}.split(): longspan.build(name, dim=32, heads=2)\n"
        "longspan.Decoder(longspan.DecoderConfig(dim=8, heads=2, depth=1, attention='linear'))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
