"""Checkpoints of other libraries whose config and files disagree: refused before anything large is built."""

import json

import pytest
import torch

from fla_laws import build
from longspan import Decoder, DecoderConfig
from longspan.compat import fla
from longspan.compat import transformers as on_cpu
from longspan.compat.transformers import loading
from longspan.serving import hub

pytestmark = pytest.mark.usefixtures("restored")
HUGE = 10**9


@pytest.fixture
def folder(tmp_path):
    build("rwkv7", head_dim=16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder, **options):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


@pytest.mark.whole
@pytest.mark.parametrize("option", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
def test_the_files_bound_what_is_built(folder, option):
    change(folder, **{option: HUGE})
    with pytest.raises(ValueError, match=r"model.*(but its files have|cannot fill the model)"):
        fla.load(folder)


@pytest.mark.parametrize("option", ["depth", "dim", "vocab", "length", "feedforward"])
def test_the_files_bound_a_decoder_of_ours(tmp_path, option):
    model = Decoder(DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5))
    on_cpu.LongspanForCausalLM.from_longspan(model).save_pretrained(tmp_path)
    change(tmp_path, **{option: HUGE})
    with pytest.raises(ValueError, match=r"must be at most|but its files have|cannot fill the model"):
        on_cpu.LongspanForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("option", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_the_files_bound_a_hybrid_that_is_served(tmp_path, option, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=41)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    change(tmp_path, **{option: HUGE}, model_type="falcon_mamba")
    monkeypatch.setattr(hub, "_tokenizer", lambda folder: "{}")
    with pytest.raises(ValueError, match=r"but its files have|cannot fill the model"):
        hub.load(str(tmp_path))


def test_models_within_their_files_are_built():
    """Also with tied weights, and where one tensor of a file becomes several."""
    with loading.bounded(None, {"one": torch.ones(3)}):
        torch.nn.Linear(5, 7)
    with (
        pytest.raises(ValueError, match="2 tensors of 12 bytes"),
        loading.bounded(None, {"a": torch.ones(3)} | {"b": torch.ones(0)}),
    ):
        torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(90))
    torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(90))  # nothing is left behind


@pytest.mark.whole
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("null", "config.json must be a JSON object, not NoneType"),
        ("[" * 100_000, "config.json is not JSON"),
        ('{"model_type": ["rwkv7"]}', r"model_type \['rwkv7'\]"),
        ('{"model_type": "rwkv7", "hidden_size": "64"}', "hidden_size='64' must be a positive whole number"),
        ('{"model_type": "rwkv7", "hidden_size": true}', "hidden_size=True must be a positive whole number"),
        ('{"model_type": "rwkv7", "head_dim": 0}', "head_dim=0 must be a positive whole number"),
        ('{"model_type": "gla", "expand_k": "1"}', "expand_k='1' must be a number"),
        ('{"model_type": "gla", "use_gk": 1}', "use_gk"),
        ('{"model_type": "mamba2", "hidden_size": 0.5}', "hidden_size=0.5 must be a positive whole number"),
    ],
)
def test_a_damaged_config_is_named(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        fla.load(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("text", ['{"weight_map": [1]}', "[]", "", '{"weight_map": {"a": 1}}', "{}"])
def test_a_damaged_index_is_named(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        fla.load(folder)


GOOD = {f"blocks.0.att.{name}1": torch.zeros(8, 8) for name in "wag"} | {
    "emb.weight": torch.zeros(8, 8),
    "blocks.0.att.r_k": torch.zeros(1, 64),
    "blocks.0.ffn.key.weight": torch.zeros(8, 8),
}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blocks.0.att.r_k", torch.zeros(64), r"blocks\.0\.att\.r_k must have 2 dimensions.*\(64,\)"),
        ("blocks.0.att.r_k", torch.zeros(0, 0), r"blocks\.0\.att\.r_k must have 2 dimensions.*\(0, 0\)"),
        ("emb.weight", torch.tensor(1.0), r"emb\.weight must have 2 dimensions.*\(\)"),
        ("blocks.0.att.w1", torch.zeros(3), r"blocks\.0\.att\.w1 must have 2 dimensions.*\(3,\)"),
        ("blocks.999999999.ln1.weight", torch.ones(8), "the 2 blocks must have the numbers 0 to 1, not 999999999"),
        ("blocks.2.ln1.weight", torch.ones(8), "the 2 blocks must have the numbers 0 to 1, not 2"),
    ],
)
def test_a_file_of_rwkv_with_other_tensors_is_refused(tmp_path, name, tensor, message):
    torch.save({**GOOD, name: tensor}, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=rf"model\.pth: {message}"):
        fla.load(tmp_path / "model.pth")
