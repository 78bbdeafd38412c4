"""Models that the real fast-transformers trained give the same outputs here, whole and token by token."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from longspan.compat.fast_transformers import builders, feature_maps
from longspan.compat.fast_transformers.causal_product import causal_dot_product
from longspan.compat.fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-peers" / "bin" / "python"

SIZES = {"n_layers": 2, "n_heads": 3, "query_dimensions": 7, "value_dimensions": 5, "feed_forward_dimensions": 11}
# Fixed where not training, so that the saved rows are those of the saved outputs.
RANDOM = {"n_dims": 22, "deterministic_eval": True}
ENCODERS = {
    "linear": {"attention_type": "linear"},
    "causal-linear": {"attention_type": "causal-linear"},
    "full": {"attention_type": "full", "activation": "gelu", "final_normalization": False},
    "full causal": {"attention_type": "full", "softmax_temp": 0.5},
    "local": {"attention_type": "local", "local_context": 5},
    "exact-topk": {"attention_type": "exact-topk", "topk": 3},
    "conditional": {"attention_type": "conditional-full:linear", "length_limit": 7},
    "Favor": {"attention_type": "causal-linear", "feature_map": ["Favor", RANDOM]},
    "Favor stabilized": {"attention_type": "linear", "feature_map": ["Favor", {**RANDOM, "stabilize": True}]},
    # A wide kernel: where estimates of either sign nearly cancel, the division would magnify rounding in both.
    "RandomFourierFeatures": {
        "attention_type": "causal-linear",
        "feature_map": ["RandomFourierFeatures", {**RANDOM, "softmax_temp": 0.05}],
    },
    "SmoothedRandomFourierFeatures": {
        "attention_type": "causal-linear",
        "feature_map": ["SmoothedRandomFourierFeatures", {**RANDOM, "smoothing": 2.0}],
    },
    "GeneralizedRandomFeatures": {"attention_type": "linear", "feature_map": ["GeneralizedRandomFeatures", RANDOM]},
}
CAUSAL = ("causal-linear", "full causal", "Favor", "RandomFourierFeatures", "SmoothedRandomFourierFeatures")
DECODERS = {
    "linear": {"self_attention_type": "causal-linear", "cross_attention_type": "linear"},
    "full": {"self_attention_type": "full", "cross_attention_type": "full"},
}

# Runs with the real library: trains each model for a few steps and saves weights, inputs and outputs.
SCRIPT = """
import json, sys
import torch
from fast_transformers import builders, feature_maps
from fast_transformers.causal_product import causal_dot_product
from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

job = json.loads(sys.stdin.read())
torch.manual_seed(0)

def build(name, options, **more):
    options = {**job["sizes"], **options, **more}
    if "feature_map" in options:
        cls, arguments = options["feature_map"]
        options["feature_map"] = getattr(feature_maps, cls).factory(**arguments)
    builder = getattr(builders, name)()
    for key, value in options.items():
        if key == "query_dimensions" and "Decoder" in name:
            builder.self_attention.query_dimensions = builder.cross_attention.query_dimensions = value
        setattr(builder, key, value)
    return builder.get()

def train(model, call):
    for _ in range(3):
        call(model).square().mean().backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
            p.grad = None
    return model.eval()

def steps(model, x, *memory):
    state, parts = None, []
    for t in range(x.shape[1]):
        y, state = model(x[:, t], *memory, state=state)
        parts.append(y)
    return torch.stack(parts, 1), state

out = {}
lengths, width = torch.tensor([13, 2, 7]), job["sizes"]["n_heads"] * job["sizes"]["value_dimensions"]
x, memory = torch.randn(3, 13, width), torch.randn(3, 13, width)
for name, options in job["encoders"].items():
    causal = name in job["causal"]
    attn = TriangularCausalMask(13) if causal else FullMask(13)
    call = lambda model: model(x, attn, LengthMask(lengths, max_len=13))
    model = train(build("TransformerEncoderBuilder", options), call)
    with torch.no_grad():
        case = {"weights": model.state_dict(), "x": x, "lengths": lengths, "y": call(model)}
        if causal:
            recurrent = build("RecurrentEncoderBuilder", options)
            recurrent.load_state_dict(model.state_dict())
            case["steps"], case["state"] = steps(recurrent.eval(), x)
    out["encoder " + name] = case
for name, options in job["decoders"].items():
    lengths = torch.tensor([11, 2, 7])
    mask = LengthMask(lengths, max_len=11)
    call = lambda model: model(x, memory[:, :11], TriangularCausalMask(13), memory_length_mask=mask)
    model = train(build("TransformerDecoderBuilder", options), call)
    other = {**options, "self_attention_type": options["self_attention_type"].replace("causal-", "")}
    recurrent = build("RecurrentDecoderBuilder", other)
    recurrent.load_state_dict(model.state_dict())
    with torch.no_grad():
        case = {"weights": model.state_dict(), "x": x, "memory": memory[:, :11], "lengths": lengths, "y": call(model)}
        case["steps"], case["state"] = steps(recurrent.eval(), x, memory[:, :11], mask)
    out["decoder " + name] = case
q, k, v = torch.randn(2, 3, 17, 5), torch.randn(2, 3, 17, 5), torch.randn(2, 3, 17, 7)
out["product"] = {"q": q, "k": k, "v": v, "y": causal_dot_product(q, k, v)}
torch.save(out, sys.argv[1])
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What the real library saved."""
    path = tmp_path_factory.mktemp("peer") / "cases.pt"
    if not list(PEER.parents[1].glob("lib/python*/site-packages/fast_transformers")):
        pytest.skip("comparing with the real fast-transformers needs: make peers")
    job = {"sizes": SIZES, "encoders": ENCODERS, "decoders": DECODERS, "causal": CAUSAL}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [PEER, "-c", SCRIPT, path], input=json.dumps(job), capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return torch.load(path, weights_only=True)


def build(name: str, options: dict):
    options = {**SIZES, **options}
    if "feature_map" in options:
        cls, arguments = options["feature_map"]
        options["feature_map"] = getattr(feature_maps, cls).factory(**arguments)
    return getattr(builders, name).from_dictionary(options).get()


def loaded(name: str, options: dict, weights: dict):
    """Our model with their weights, which must be exactly those that it has."""
    model = build(name, options)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def steps(model, x, *memory):
    state, parts = None, []
    for t in range(x.shape[1]):
        y, state = model(x[:, t], *memory, state=state)
        parts.append(y)
    return torch.stack(parts, 1), state


def close(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoder_gives_the_same_outputs(theirs, name):
    case = theirs[f"encoder {name}"]
    model = loaded("TransformerEncoderBuilder", ENCODERS[name], case["weights"])
    attn = TriangularCausalMask(13) if name in CAUSAL else FullMask(13)
    mask = LengthMask(case["lengths"], max_len=13)
    y, expected = model(case["x"], attn, mask), case["y"]
    if name == "local":
        # A window of padding alone gives zero here, and there the mean of what the window holds.
        y, expected = y[mask.bool_matrix], expected[mask.bool_matrix]
    close(y, expected)


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_a_recurrent_encoder_gives_the_same_outputs_and_states(theirs, name):
    case = theirs[f"encoder {name}"]
    y, state = steps(loaded("RecurrentEncoderBuilder", ENCODERS[name], case["weights"]), case["x"])
    close(y, case["steps"])
    close(state, case["state"])


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_decoder_gives_the_same_outputs(theirs, name):
    case = theirs[f"decoder {name}"]
    model = loaded("TransformerDecoderBuilder", DECODERS[name], case["weights"])
    mask = LengthMask(case["lengths"], max_len=11)
    close(model(case["x"], case["memory"], TriangularCausalMask(13), memory_length_mask=mask), case["y"])


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_recurrent_decoder_gives_the_same_outputs_and_states(theirs, name):
    case = theirs[f"decoder {name}"]
    model = loaded("RecurrentDecoderBuilder", DECODERS[name], case["weights"])
    y, state = steps(model, case["x"], case["memory"], LengthMask(case["lengths"], max_len=11))
    close(y, case["steps"])
    close(state, case["state"])


@pytest.mark.parametrize("name", ENCODERS)
def test_parameters_come_in_the_same_order(theirs, name):
    """An optimizer's checkpoint knows them by number."""
    model = build("TransformerEncoderBuilder", ENCODERS[name])
    theirs_in_order = [key for key in theirs[f"encoder {name}"]["weights"] if not key.endswith("omega")]
    assert [key for key, _ in model.named_parameters()] == theirs_in_order


def test_the_causal_product_gives_the_same_numbers(theirs):
    case = theirs["product"]
    close(causal_dot_product(case["q"], case["k"], case["v"]), case["y"])
