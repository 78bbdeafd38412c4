"""Mamba and Mamba-2 checkpoints of flash-linear-attention, in transformers' classes."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import longspan.compat.transformers as on_cpu
from fla_laws import IDS, close, convolved, padded, rms
from longspan.compat import fla
from longspan.compat.fla import models

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 41}
CASES = {
    "mamba": ("mamba", {"state_size": 5, "norm_eps": 1e-2, "dt_rank": 3}),
    "mamba-bias": ("mamba", {"use_bias": True, "use_conv_bias": False, "expand": 3, "conv_kernel": 3}),
    "mamba2": ("mamba2", {"head_dim": 8, "state_size": 6, "norm_eps": 1e-2, "dt_limit": [0.01, 0.5]}),
    "mamba2-groups": ("mamba2", {"head_dim": 16, "state_size": 4, "n_groups": 2, "use_bias": True}),
}


@pytest.fixture(autouse=True)
def _restored():
    yield
    on_cpu.restore()


def checkpoint(folder, name, options):
    """Write a checkpoint as flash-linear-attention does; return its float64 weights and all options."""
    family = models.supported()[name]
    torch.manual_seed(0)
    model = family.model(family.config(**SIZES, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    more = {"pad_token_id": 0, "eos_token_id": 2, "fuse_norm": True, "transformers_version": "4.50.0"}
    text = json.dumps({"model_type": name, **SIZES, **options, **more})
    (folder / "config.json").write_text(text)
    weights = {key: value.double() for key, value in model.state_dict().items()}
    return weights, {"norm_eps": 1e-5, "expand": 2, "n_groups": 1, "dt_limit": (0.0, float("inf"))} | SIZES | options


def mixed(x, w):
    return F.silu(convolved(x, w["conv1d.weight"]) + w.get("conv1d.bias", 0.0))


def mamba(x, w, options):
    u, z = F.linear(x, w["in_proj.weight"], w.get("in_proj.bias")).chunk(2, -1)
    u, states = mixed(u, w), w["A_log"].shape[1]
    dt, b, c = (u @ w["x_proj.weight"].T).split([w["dt_proj.weight"].shape[1], states, states], -1)
    dt = F.softplus(dt @ w["dt_proj.weight"].T + w["dt_proj.bias"])
    h, rows = torch.zeros(len(x), *w["A_log"].shape).double(), []
    for t in range(x.shape[1]):
        h = torch.exp(-dt[:, t, :, None] * w["A_log"].exp()) * h + (dt * u)[:, t, :, None] * b[:, t, None]
        rows.append((h * c[:, t, None]).sum(-1) + w["D"] * u[:, t])
    return F.linear(torch.stack(rows, 1) * F.silu(z), w["out_proj.weight"], w.get("out_proj.bias"))


def mamba2(x, w, options):
    heads, size, groups = len(w["A_log"]), options["head_dim"], options["n_groups"]
    width, keys = heads * size, groups * options["state_size"]
    z, u, dt = F.linear(x, w["in_proj.weight"], w.get("in_proj.bias")).split([width, width + 2 * keys, heads], -1)
    u, b, c = mixed(u, w).split([width, keys, keys], -1)
    u = u.unflatten(-1, (heads, size))
    b, c = (t.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2) for t in (b, c))
    dt = F.softplus(dt + w["dt_bias"]).clamp(*options["dt_limit"])
    h, rows = torch.zeros(len(x), heads, size, options["state_size"]).double(), []
    for t in range(x.shape[1]):
        keep = torch.exp(-dt[:, t] * w["A_log"].exp())[..., None, None]
        h = keep * h + (dt[:, t, :, None] * u[:, t])[..., None] * b[:, t, :, None]
        rows.append((h * c[:, t, :, None]).sum(-1) + w["D"][:, None] * u[:, t])
    y = (torch.stack(rows, 1).flatten(-2) * F.silu(z)).unflatten(-1, (groups, -1))
    y = rms(y, options["norm_eps"], w["norm.weight"].view(groups, -1)).flatten(-2)
    return F.linear(y, w["out_proj.weight"], w.get("out_proj.bias"))


def logits(weights, ids, name, options):
    x = weights["backbone.embeddings.weight"][ids]
    for layer in range(2):
        prefix = f"backbone.layers.{layer}."
        own = {key.removeprefix(f"{prefix}mixer."): value for key, value in weights.items() if prefix in key}
        normed = rms(x, options["norm_eps"], weights[f"{prefix}norm.weight"])
        x = x + globals()[name](normed, own, options)
    return rms(x, options["norm_eps"], weights["backbone.norm_f.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_recurrence(case, tmp_path):
    name, options = CASES[case]
    weights, options = checkpoint(tmp_path, name, options)
    model = fla.load(tmp_path)
    assert not model.training
    for tokens in (8, 80):
        ids = torch.arange(2 * tokens).view(2, tokens) * 7 % 41
        with torch.no_grad():
            close(model(ids).logits.double(), logits(weights, ids, name, options), 2e-5)


def test_mamba2_runs_on_the_kernels(tmp_path):
    checkpoint(tmp_path, *CASES["mamba2"])
    with torch.no_grad():
        fla.load(tmp_path)(IDS)
    called = on_cpu.status().functions["mamba2"]
    by = [backend for name in ("mamba2_chunk_scan", "causal_conv1d_fn") for backend in called[name]]
    assert len(by) == 2
    assert not any("original" in backend for backend in by)


@pytest.mark.parametrize("case", CASES)
def test_generates(case, tmp_path):
    checkpoint(tmp_path, *CASES[case])
    model = fla.load(tmp_path)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    found = [model.generate(IDS, use_cache=cache, **options) for cache in (True, False)]
    assert torch.equal(*found)


@pytest.mark.parametrize("case", CASES)
def test_padding_on_either_side_changes_nothing(case, tmp_path):
    checkpoint(tmp_path, *CASES[case])
    padded(fla.load(tmp_path))


@pytest.mark.parametrize("case", ["mamba", "mamba2"])
def test_the_early_name_of_the_embedding_is_read(case, tmp_path):
    weights, _ = checkpoint(tmp_path, *CASES[case])
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    stored["backbone.embedding.weight"] = stored.pop("backbone.embeddings.weight")
    save_file(stored, file, {"format": "pt"})
    model = fla.load(tmp_path)
    assert torch.equal(model.backbone.embeddings.weight.double(), weights["backbone.embeddings.weight"])


@pytest.mark.parametrize("case", ["mamba", "mamba2"])
def test_what_transformers_saves_is_loaded_again(case, tmp_path):
    checkpoint(tmp_path / "first", *CASES[case])
    model = fla.load(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    again = fla.load(tmp_path / "second")
    assert again.config.layer_norm_epsilon == 1e-2
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_missing_weights_are_refused(tmp_path):
    checkpoint(tmp_path, *CASES["mamba"])
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    del stored["backbone.norm_f.weight"]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: backbone\.norm_f\.weight"):
        fla.load(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba2", {"D_has_hdim": True}, "D_has_hdim=True must be False"),
        ("mamba2", {"norm_before_gate": True}, "norm_before_gate=True must be False"),
        ("mamba2", {"rmsnorm": False}, "rmsnorm=False must be True"),
        ("mamba2", {"num_heads": 3}, "num_heads=3 must be 64"),
        ("mamba", {"intermediate_size": 100}, "intermediate_size=100 must be 4096"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
        ("mamba", {"new_option": 3}, "new_option=3"),
    ],
)
def test_unsupported_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        models.supported()[name].config(**options)
