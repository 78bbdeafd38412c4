"""ONNX files: one graph for prompts and steps, in which onnxruntime computes the model's outputs."""

import json

import pytest
import torch

import longspan
from longspan.cli import entry
from longspan.compat import onnx as ours

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def late(*specs):
    """Exporting takes seconds: these are of families with others."""
    return [pytest.param(spec, marks=pytest.mark.slow) for spec in specs]


SPECS = (
    *("gated_deltanet(key_heads=1)", "kda", "gla", "ssd", "linear"),
    *late("gated_deltanet", "kda(convolution=0)", "deltanet", "retention"),
)


class Session:
    """A file, run without longspan: its metadata describes the states."""

    def __init__(self, path):
        self.run = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.facts = self.run.get_modelmeta().custom_metadata_map
        self.names = [one.name for one in self.run.get_inputs()]
        kinds = {"tensor(float)": torch.float32, "tensor(int64)": torch.int64}
        self.kinds = {one.name: kinds[one.type] for one in self.run.get_inputs()}

    def start(self, batch):
        shapes = json.loads(self.facts["state"])
        return [torch.zeros([batch, *shapes[name][1:]], dtype=self.kinds[name]) for name in self.names[1:]]

    def __call__(self, x, state):
        given = dict(zip(self.names, [x.numpy(), *(t.numpy() for t in state)], strict=True))
        y, *state = map(torch.as_tensor, self.run.run(None, given))
        return y, state


def close(a, b):
    return float((a - b).abs().max()) <= 1e-5 * max(1.0, float(b.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_an_attention_is_one_node(spec, tmp_path):
    torch.manual_seed(0)
    attention = longspan.build(spec, dim=16, heads=2)
    found = ours.export(attention, tmp_path / "a.onnx")
    assert found["nodes"]["com.microsoft::LinearAttention"] == 1
    assert found["difference"] <= 1e-5
    session, attention = Session(tmp_path / "a.onnx"), attention.eval()
    for n in (1, 9, 300):
        x = torch.randn(3, n, 16)
        y, state = attention(x, attention.init_state(3))
        theirs, after = session(x, session.start(3))
        assert close(theirs, y)
        token = torch.randn(3, 1, 16)
        y, state = attention(token, state)
        theirs, after = session(token, after)
        assert close(theirs, y)
        assert all(close(a, b) for a, b in zip(after, state, strict=True) if b.numel())


@torch.no_grad()
@pytest.mark.parametrize("spec", ["gated_deltanet(key_heads=1)", "linear"])
def test_the_standards_operator(spec, tmp_path):
    torch.manual_seed(0)
    attention = longspan.build(spec, dim=16, heads=2).eval()
    found = ours.export(attention, tmp_path / "a.onnx", domain="ai.onnx")
    assert found["nodes"]["LinearAttention"] == 1
    assert [(one.domain, one.version) for one in onnx.load(tmp_path / "a.onnx").opset_import] == [("", 27)]
    onnx.checker.check_model(str(tmp_path / "a.onnx"))
    session, x = Session(tmp_path / "a.onnx"), torch.randn(3, 9, 16)
    assert close(session(x, session.start(3))[0], attention(x)[0])


@torch.no_grad()
@pytest.mark.parametrize(
    ("specs", "positions", "nodes"),
    # Rotary sums have a numerator and a denominator.
    [
        ("gated_deltanet(key_heads=1); softmax; linear", "learned", 2),
        pytest.param("softmax(kv_heads=1); linear", "rotary", 2, marks=pytest.mark.slow),
    ],
)
def test_a_hybrid_decoder_writes_what_it_writes_here(specs, positions, nodes, tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": specs.count(";") + 1, "heads": 2, "feedforward": 32, "vocab": 11, "length": 60}
    model = longspan.Decoder(longspan.DecoderConfig(**sizes, attention=specs, positions=positions)).eval()
    longspan.save(model, tmp_path / "model")
    assert entry.main(["export", str(tmp_path / "model"), str(tmp_path / "m.onnx")]) == 0
    assert f"{nodes} of them LinearAttention" in capsys.readouterr().out
    session = Session(tmp_path / "m.onnx")
    assert int(session.facts["start"]) == 11
    prompt = torch.randint(11, (3, 9))
    y, state = session(torch.cat([torch.full((3, 1), 11), prompt], 1), session.start(3))
    drawn = []
    for _ in range(20):
        drawn.append(y[:, -1].argmax(-1))
        y, state = session(drawn[-1][:, None], state)
    expected = list(longspan.generate(model, prompt, max_new_tokens=20, temperature=0, stream=True))
    assert torch.equal(torch.stack(drawn, 1), torch.stack(expected, 1))


def test_what_cannot_be_exported_is_refused(tmp_path):
    path, packed = tmp_path / "a.onnx", longspan.build("linear", dim=64, heads=2)
    longspan.quantize(packed, "int8")
    sizes = {"dim": 8, "heads": 2}
    for module, options, message in (
        (torch.nn.Linear(2, 2), {}, "Decoder.*Linear"),
        (longspan.build("linear", **sizes, causal=False), {}, "linear.*causal=True"),
        (longspan.build("linear", **sizes).double(), {}, r"query.weight .*torch.float64.*model.float\(\).cpu\(\)"),
        (packed, {}, r"query has quantized weights.*before quantize\(\)"),
        (longspan.build("linear", **sizes), {"domain": "onnx"}, "'onnx'"),
        (longspan.build("reformer(chunk=3, buckets=4, rounds=1)", **sizes), {}, "reformer"),
        (longspan.build("local(window=5)", **sizes), {}, "local.*number of tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.export(module, path, **options)
    assert not path.exists()


def test_a_file_with_other_outputs_is_not_written(tmp_path, monkeypatch):
    class Other(ours.Graph):
        def forward(self, given, *state):
            y, *end = super().forward(given, *state)
            # The graph has been made by then.
            return y + (0.0 if torch.compiler.is_compiling() else 1e-3), *end

    monkeypatch.setattr(ours, "Graph", Other)
    with pytest.raises(ValueError, match="y .*1.0e-03 at 1 tokens after 0"):
        ours.export(longspan.build("gla", dim=8, heads=2), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_an_encoder_has_no_step(tmp_path, capsys):
    encoder = longspan.Encoder(longspan.EncoderConfig(dim=8, heads=2, depth=1, feedforward=8, vocab=5))
    longspan.save(encoder, tmp_path / "encoder")
    assert entry.main(["export", str(tmp_path / "encoder"), str(tmp_path / "m.onnx")]) == 2
    assert "holds a Encoder; only a decoder" in capsys.readouterr().err


class Block(torch.nn.Module):
    """A module of a user, with a mechanism inside."""

    def __init__(self, spec):
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(16), longspan.build(spec, dim=16, heads=2)

    def forward(self, x, mask=None):
        return x + self.attention(self.norm(x), mask=mask)[0]


def exported(spec, *given, free=False):
    """A session of a block that ``torch.onnx.export`` itself writes, and the block."""
    torch.manual_seed(0)
    block = Block(spec).eval()
    n = torch.export.Dim("N", min=2)
    shapes = tuple({1: n} for _ in given) if free else None
    with ours._quiet():
        program = torch.onnx.export(block, given, dynamo=True, dynamic_shapes=shapes, verbose=False)
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda *x: torch.as_tensor(
        session.run(None, dict(zip(names, (t.numpy() for t in x), strict=True)))[0]
    ), block


@torch.no_grad()
@pytest.mark.parametrize("spec", ["gated_deltanet", "linear", *late("gla", "kda")])
def test_torch_exports_a_module_around_a_mechanism(spec):
    session, block = exported(spec, torch.randn(1, 9, 16), free=True)
    for n in (9, 40):
        x = torch.randn(1, n, 16)
        assert close(session(x), block(x))


@torch.no_grad()
@pytest.mark.parametrize("spec", ["mamba", "rwkv7", *late("mamba3", "retention")])
def test_torch_exports_other_recurrences_with_a_fixed_length(spec):
    x = torch.randn(2, 9, 16)
    session, block = exported(spec, x)
    assert close(session(x), block(x))


@torch.no_grad()
def test_torch_exports_a_mask():
    mask = torch.arange(9)[None] < torch.tensor([[9], [5]])
    session, block = exported("deltanet", torch.randn(2, 9, 16), mask)
    x = torch.randn(2, 9, 16)
    assert close(session(x, mask)[mask], block(x, mask)[mask])
