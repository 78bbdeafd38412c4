"""RWKV-6 and RWKV-7 checkpoints of flash-linear-attention."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from fla_laws import IDS, build, cache_of, close, saved
from fla_original import CASES, RANKS
from longspan.compat import fla


def test_the_eps_of_the_two_norms_differs():
    """A key of length 1e-3 has length 1 / sqrt(2) after the fused norm, and 1 after the other."""
    fused, other = (build("rwkv7", head_dim=16, fuse_norm=value).model.layers[0].attn for value in (True, False))
    k = torch.tensor([6e-4, -8e-4])
    close(fused.unit(k).norm(), torch.tensor(0.5**0.5))
    close(other.unit(k).norm(), torch.tensor(1.0))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("name", "options"), [CASES["rwkv6"], CASES["rwkv7"]])
def test_checkpointing_changes_no_gradient(name, options, reentrant):
    found = []
    for checkpointing in (False, True):
        model = build(name, **options).train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=embedded, labels=IDS).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for parameter, grad in found[0].items():
        close(found[1][parameter], grad, 1e-6)


def author_format(model):
    """The weights of a model under the names of the author's files."""
    found = {}
    top = {"model.embeddings.weight": "emb.weight", "lm_head.weight": "head.weight"}
    parts = {"pre_norm": "ln0", "attn_norm": "ln1", "ffn_norm": "ln2", "attn": "att", "ffn": "ffn"}
    modules = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output", "g_norm": "ln_x"}
    for name, tensor in model.state_dict().items():
        if not name.startswith("model.layers."):
            found[top.get(name, name.replace("model.norm", "ln_out"))] = tensor
            continue
        _, _, layer, part, *rest = name.split(".")
        new = ".".join([modules[one] if one in modules else one for one in rest])
        if "lora" in new:
            number = {"0.weight": 1, "2.weight": 2, "2.bias": 0}[".".join(rest[2:])]
            new, tensor = f"{rest[0][0]}{number}", tensor.T if number else tensor
        if tensor.dim() == 1 and part in ("attn", "ffn") and "ln_x" not in new:
            tensor = tensor[None, None]
        found[f"blocks.{layer}.{parts[part]}.{new}"] = tensor.clone()
    return found


@pytest.mark.parametrize("norm_first", [True, False])
def test_files_of_the_author_give_the_same_logits(tmp_path, norm_first):
    model = build("rwkv7", hidden_size=64, head_dim=64, fuse_norm=False, norm_first=norm_first, **RANKS)
    weights = author_format(model)
    # The first layer has these in some files, unused.
    weights["blocks.0.att.v1"] = torch.randn(64, 7)
    torch.save(weights, tmp_path / "rwkv.pth")
    loaded = fla.load(tmp_path / "rwkv.pth")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert not loaded.training
    saved(loaded, tmp_path / "saved")
    half = {name: t.bfloat16() for name, t in weights.items()}
    torch.save(half, tmp_path / "half.pth", _use_new_zipfile_serialization=False)
    assert fla.load(tmp_path / "half.pth").dtype == torch.bfloat16
    assert fla.load(tmp_path / "half.pth", dtype=torch.float32).dtype == torch.float32


def test_files_are_written_in_the_authors_format(tmp_path):
    model = build("rwkv7", hidden_size=64, head_dim=64, fuse_norm=False, **RANKS)
    fla.save_pth(model, tmp_path / "rwkv.pth")
    written, expected = torch.load(tmp_path / "rwkv.pth"), author_format(model)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    with pytest.raises(ValueError, match="rwkv7 have this format, not rwkv6"):
        fla.save_pth(build("rwkv6", num_heads=2), tmp_path / "rwkv.pth")


@pytest.mark.parametrize("size", [16, 32, 128])
def test_files_with_other_heads_have_the_authors_group_norm(tmp_path, size):
    """Its eps is 64e-5 for every size of the heads."""
    options = {"hidden_size": max(32, size), "head_dim": size, "fuse_norm": False}
    model = build("rwkv7", **options).double()
    for layer in model.model.layers:
        # Outputs so small that the eps decides.
        layer.attn.v_proj.weight.data.mul_(0.1)
    torch.save(author_format(model), tmp_path / "rwkv.pth")
    loaded = fla.load(tmp_path / "rwkv.pth")
    assert loaded.dtype == torch.float64
    with torch.no_grad():
        other = model(IDS).logits
        for layer in model.model.layers:
            layer.attn.g_norm.eps = 64e-5
        expected = model(IDS).logits
        close(loaded(IDS).logits, expected, 1e-11)
        assert (other - expected).abs().max() > 1e-4
        # Written again, the file has the weights it had.
        fla.save_pth(loaded, tmp_path / "again.pth")
        for name, tensor in torch.load(tmp_path / "again.pth").items():
            close(tensor, author_format(model)[name], 1e-15)


def test_heads_whose_scale_half_precision_would_round_are_refused(tmp_path):
    for size in (16, 32):
        weights = author_format(build("rwkv7", head_dim=size, fuse_norm=False))
        torch.save({name: t.bfloat16() for name, t in weights.items()}, tmp_path / f"{size}.pth")
    # A scale of 1/2 rounds nothing.
    half, wide = (fla.load(tmp_path / "16.pth", **options) for options in ({}, {"dtype": torch.float32}))
    assert half.dtype == torch.bfloat16
    assert all(torch.equal(a.float(), b) for a, b in zip(half.parameters(), wide.parameters(), strict=True))
    for options in ({}, {"dtype": torch.bfloat16}, {"dtype": "auto"}):
        with pytest.raises(ValueError, match=r"heads of 32 channels.*0\.7071.*bfloat16.*dtype=torch.float32"):
            fla.load(tmp_path / "32.pth", **options)
    loaded = fla.load(tmp_path / "32.pth", dtype=torch.float32)
    r_k = weights["blocks.1.att.r_k"].bfloat16().float()
    assert torch.equal(loaded.model.layers[1].attn.r_k, (r_k.double() * 2**0.5).float())
    with pytest.raises(ValueError, match=r"heads of 32 channels.*model\.float\(\)"):
        fla.save_pth(loaded.bfloat16(), tmp_path / "again.pth")


def test_the_format_has_one_eps(tmp_path):
    with pytest.raises(ValueError, match=r"norm_eps=0.001 must be 1e-05"):
        fla.save_pth(build("rwkv7", head_dim=16, norm_eps=1e-3), tmp_path / "rwkv.pth")


PACKAGE = """
import os, sys, torch
os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="0", RWKV_CUDA_ON="0")
from rwkv.model import RWKV
model = RWKV(model=sys.argv[1], strategy="cpu fp32")
ids = torch.load(sys.argv[2]).tolist()
whole, state = model.forward(list(ids), None, full_output=True)
steps = []
for token in ids[:5]:
    logits, state = model.forward([token], state)
    steps.append(logits)
torch.save((whole, torch.stack(steps)), sys.argv[3])
"""


@pytest.mark.full
@pytest.mark.parametrize(("length", "size"), [(8, 64), (80, 64), (8, 16), (80, 32)])
def test_logits_equal_those_of_the_authors_package(tmp_path, length, size):
    pytest.importorskip("rwkv", reason="the author's package: pip install rwkv")
    model = build("rwkv7", hidden_size=128, head_dim=size, fuse_norm=False, norm_first=True).float()
    ids = torch.randint(1, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
    fla.save_pth(model, tmp_path / "model.pth")
    torch.save(ids, tmp_path / "ids.pt")
    files = [str(tmp_path / name) for name in ("model", "ids.pt", "out.pt")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", PACKAGE, *files], check=True, capture_output=True)
    whole, steps = torch.load(tmp_path / "out.pt")
    with torch.no_grad():
        first = model(ids[None], use_cache=True)
        close(first.logits[0], whole, 2e-5)
        cache = first.past_key_values
        for token, expected in zip(ids[:5], steps, strict=True):
            found = model(token[None, None], past_key_values=cache, use_cache=True)
            close(found.logits[0, 0], expected, 2e-5)


def test_foreign_files_are_refused_by_name(tmp_path):
    weights, path = author_format(build("rwkv7", head_dim=16)), tmp_path / "rwkv.pth"

    def without(name):
        return {one: t for one, t in weights.items() if one != name}

    for content, message in (
        (weights | {"blocks.0.ffn.s_emb.weight": torch.zeros(1)}, r"blocks\.0\.ffn\.s_emb\.weight.*DeepEmbed"),
        (without("blocks.0.att.r_k"), r"blocks\.0\.att\.r_k"),
        (without("blocks.2.att.ln_x.bias"), r"model\.layers\.2\.attn\.g_norm\.bias"),
        ([1], "state dict"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=message):
            fla.load(path)
    for content in (b"no file of torch", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot load .*rwkv\.pth"):
            fla.load(path)
    with pytest.raises(FileNotFoundError, match=r"other\.pth"):
        fla.load(tmp_path / "other.pth")


def test_older_checkpoints_give_the_same_logits(tmp_path):
    """The six mixes of a layer were one tensor."""
    model = build("rwkv7", head_dim=16)
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    for layer in range(3):
        one = f"model.layers.{layer}.attn.x_"
        weights[f"{one}x"] = torch.stack([weights.pop(f"{one}{name}").flatten() for name in "rwkvag"])
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        assert torch.equal(fla.load(tmp_path)(IDS).logits, model(IDS).logits)
    weights["model.layers.1.attn.x_x"] = torch.zeros(5, 32)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.attn\.x_x must be \(6, hidden\)"):
        fla.load(tmp_path)


def test_head_dim_takes_precedence():
    """Published configs have a number of heads that does not fit."""
    assert build("rwkv7", head_dim=8, num_heads=32).model.layers[0].attn.heads == 4


@pytest.mark.parametrize(("name", "options"), [CASES["rwkv6"], CASES["rwkv7"]])
def test_a_masked_token_changes_no_state(name, options):
    model = build(name, **options)
    with torch.no_grad():
        cache = cache_of(model(IDS, use_cache=True))
        expected = model(torch.cat([IDS, IDS[:, :1]], 1)).logits[:, -1]
        mask = torch.ones(2, IDS.shape[1] + 1)
        mask[0, -1] = 0
        model(IDS[:, 5:6], cache=cache, attention_mask=mask)
        close(model(IDS[:, :1], cache=cache).logits[0, -1], expected[0])
