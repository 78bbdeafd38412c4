"""Models with weights of 8 and 4 bits: what is replaced, what stays, checkpoints, and the decode engine."""

import copy
import itertools
import re

import pytest
import torch
from torch import nn

import longspan
from longspan import Decoder, DecoderConfig
from longspan.generation.native_decoder import Engine
from longspan.models import checkpoint
from longspan.modules.quantized import QuantizedEmbedding, QuantizedLinear
from longspan.ops.native.call import available
from longspan.ops.quantized import formats, pack


def decoder(attention="linear; softmax(kv_heads=2)", dtype=torch.float32, **options):
    config = {"dim": 64, "depth": 2, "heads": 4, "feedforward": 96, "vocab": 67, "length": 64, "activation": "swiglu"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(attention=attention, **config | options))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


@torch.no_grad()
def test_what_is_rounded_and_what_stays():
    model = decoder("gated_deltanet; linear")
    exact = copy.deepcopy(model)
    report = {layer.name: layer for layer in longspan.quantize(model, "int4", skip=["*.contract", "head"])}
    assert type(model.stack.blocks[0].attention.query) is QuantizedLinear
    assert type(model.embedding.tokens) is QuantizedEmbedding
    assert {report[name].reason for name in ("head", "stack.blocks.0.feedforward.contract")} == {"it is skipped"}
    assert report["stack.blocks.0.attention.rate"].reason == "it has 4 outputs, less than 64"
    assert report["stack.blocks.0.attention.query"].format == "Q4_0"
    assert report["embedding.tokens"].format == "Q8_0"
    for name, layer in report.items():
        before, after = exact.get_submodule(name).weight.detach(), model.get_submodule(name).weight
        error = float((after - before).norm() / before.norm())
        assert error == pytest.approx(layer.error, rel=1e-3)
        assert error < {"": 1e-9, "Q8_0": 0.01, "Q4_0": 0.15}[layer.format]
    tokens = torch.arange(30)[None]
    rounded = [model(tokens)[0] - exact(tokens)[0]]
    coarse = copy.deepcopy(exact)
    longspan.quantize(coarse, "int8", activations="float32")
    rounded.append(coarse(tokens)[0] - exact(tokens)[0])
    fine, rough = float(rounded[1].norm()), float(rounded[0].norm())
    assert fine < 0.3 * rough < 0.3 * float(exact(tokens)[0].norm())


def test_any_model_and_shared_weights():
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.odd, self.head = nn.Embedding(70, 64), nn.Linear(33, 64), nn.Linear(64, 70, bias=False)
            self.head.weight = self.embed.weight
            self.inner = nn.ModuleList([nn.Linear(64, 64)])

        def forward(self, tokens):
            return self.head(self.inner[0](self.embed(tokens)))

    model = Foreign()
    report = longspan.quantize(model, "int4")
    assert [(layer.format, layer.reason) for layer in report] == [
        ("Q8_0", ""),
        ("", "33 inputs are not a multiple of 32"),
        ("Q8_0", ""),
        ("Q4_0", ""),
    ]
    assert model.head.quants is model.embed.quants
    assert (model.head.weight.dtype, model.head.weight.shape) == (torch.float32, (70, 64))
    # In half precision the integers stay, and the gradient reaches what is before.
    half = model.bfloat16()(torch.arange(3))
    assert half.dtype == torch.bfloat16
    assert model.embed.quants.dtype == torch.uint8
    x = torch.randn(2, 64, requires_grad=True)
    model.inner[0](x).sum().backward()
    assert torch.allclose(x.grad, model.float().inner[0].dequantize().sum(0).expand(2, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: longspan.quantize(m, "int5"), "unknown kind of weights 'int5'"),
        (lambda m: longspan.quantize(m, "int8", activations="int4"), "unknown kind of activations 'int4'"),
        (lambda m: longspan.quantize(m, "int8", skip=["heads"]), "skip='heads' matches no linear layer or embedding"),
        (lambda m: longspan.quantize(nn.Linear(64, 8), "int8"), "no linear layer or embedding to quantize (: it has 8"),
        (
            lambda m: longspan.quantize(m.to(torch.float32).fill(), "int8"),
            "head cannot be quantized: the weight contains",
        ),
    ],
)
def test_refusals_leave_the_model(call, message):
    model = decoder()

    def fill():
        model.head.weight.data[0, 0] = torch.nan
        return model

    model.fill = fill
    with pytest.raises(ValueError, match=re.escape(message)):
        call(model)
    assert type(model.embedding.tokens) is nn.Embedding


def test_checkpoints_keep_it(tmp_path):
    for tied, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = decoder(tied=tied, dtype=dtype)
        longspan.quantize(model, "int4", activations="int8", skip="*.value")
        longspan.save(model, tmp_path / "a")
        again, tokens = longspan.load(tmp_path / "a"), torch.arange(20)[None]
        assert again.state_dict().keys() == model.state_dict().keys()
        assert again.stack.blocks[0].attention.query.activations == "int8"
        assert again(tokens)[0].equal(model(tokens)[0])
    size = (tmp_path / "a" / "model.safetensors").stat().st_size
    assert size < 0.5 * sum(p.nbytes for p in decoder(dtype=torch.bfloat16).parameters())


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "quantized must be a dict by layer"),
        ({"heads": {}}, "quantized has 'heads', but the model has no linear layer"),
        ({"head": {"format": "Q8_0"}}, "quantized['head'] must have format and activations"),
        ({"head": {"format": "Q9", "activations": "int16"}}, "unknown format of blocks 'Q9'"),
        ({"head": {"format": "Q4_K", "activations": "int16"}}, "64 inputs are no whole blocks of Q4_K"),
        ({"head": {"format": "Q8_0", "activations": "int3"}}, "unknown kind of activations 'int3'"),
        (
            {"head": {"format": "Q8_0", "activations": "int16", "shares": "tail"}},
            "quantized['head'] shares the weights of 'tail', which is not quantized",
        ),
    ],
)
def test_invalid_checkpoints_are_refused(layers, message, tmp_path, monkeypatch):
    model = decoder()
    longspan.quantize(model, "int8")
    monkeypatch.setattr(checkpoint.quantization, "described", lambda model: layers or [1])
    longspan.save(model, tmp_path / "a")
    with pytest.raises(ValueError, match=re.escape(message)):
        longspan.load(tmp_path / "a")


STACKS = {
    "linear; softmax(kv_heads=2)": ("learned", "int8", "int16", True),
    "softmax": ("sinusoidal", "int4", "int8", True),
    "gated_deltanet; kda": ("none", "int4", "int16", False),
    "gla; ssd": ("none", "int8", "float32", False),
    "retention; softmax": ("rotary", "int8", "int8", False),
}


@pytest.mark.skipif(not available("decode/step"), reason="no native kernels here")
@pytest.mark.parametrize("attention", STACKS)
def test_the_decode_engine_reads_quantized_weights(attention):
    """As the model computes, and with the same bits for any rows together, threads, and several tokens at a time."""
    positions, weights, activations, tied = STACKS[attention]
    model = decoder(attention, positions=positions, tied=tied, dim=128, feedforward=160)
    longspan.quantize(model, weights, activations=activations)
    engine, generator = Engine(model), torch.Generator().manual_seed(0)
    packed = [m.quants for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert {t.data_ptr() for t in packed} <= {t.data_ptr() for t in engine.weights.kept}, "a copy"
    tokens = torch.randint(67, (51, 6), generator=generator)
    state, own = model.init_state(51), model.init_state(51)
    found = []
    with torch.no_grad():
        for i in range(6):
            y, state = engine(tokens[:, i : i + 1], state)
            right, own = model(tokens[:, i : i + 1], own)
            # Rounding to 8 bits amplifies the last digits of what is rounded.
            tolerance = 3e-2 if activations == "int8" else 2e-4
            assert (y - right).abs().max() <= tolerance * right.abs().max()
            found.append(y)
    found, threads = torch.cat(found, 1), torch.get_num_threads()
    try:
        for row, count in itertools.product((0, 50), (1, 3)):
            torch.set_num_threads(count)
            several, _ = engine.verify(tokens[row : row + 1], model.init_state(1))
            assert several.equal(found[row : row + 1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not available("decode/step"), reason="no native kernels here")
def test_the_decode_engine_reads_blocks_of_files():
    """In linear layers and in embeddings; it declines formats without kernels."""
    model = decoder("linear", dim=256, feedforward=256)
    head, generator = model.head, torch.Generator().manual_seed(0)
    for format in ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_0"):
        data = torch.randint(
            0, 40, (68, formats.FORMATS[format].row_bytes(256)), dtype=torch.uint8, generator=generator
        )
        model.head = QuantizedLinear(pack(formats.Blocks(data[:67], format, 256)), head.bias)
        model.embedding.tokens = QuantizedEmbedding(pack(formats.Blocks(data, format, 256)))
        if format == "Q5_0":
            assert Engine.why_not(model).endswith("has weights in the format Q5_0")
            continue
        y, _ = Engine(model)(torch.tensor([[3]]), model.init_state(1))
        with torch.no_grad():
            right, _ = model(torch.tensor([[3]]), model.init_state(1))
        assert (y - right).abs().max() < 1e-4 * right.abs().max()
