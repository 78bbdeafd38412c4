"""RWKV-6 and RWKV-7 checkpoints of flash-linear-attention."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from fla_laws import IDS, build, cache_of, close, saved, shared_tests
from longspan.compat import fla

CASES = {
    "rwkv6": ("rwkv6", {"num_heads": 2}),
    "rwkv6-wide": (
        "rwkv6",
        {"num_heads": 4, "expand_k": 1.0, "expand_v": 0.5, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5}
        | {"norm_first": False, "norm_bias": False},
    ),
    "rwkv6-hybrid": ("rwkv6", {"num_heads": 2, "attn": {"layers": [1], "num_heads": 4, "window_size": 5}}),
    "rwkv7": ("rwkv7", {"head_dim": 16}),
    "rwkv7-wide": (
        "rwkv7",
        {"head_dim": None, "num_heads": 4, "value_dim": [64, 64, 64], "fuse_norm": False, "norm_first": False}
        | {"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 7},
    ),
}


REFUSED = [
    ("rwkv7", {"attn": {"layers": [1], "num_heads": 4}}, "attn=.* must be null"),
    ("rwkv7", {"value_dim": [32, 64, 32], "head_dim": 16}, "both 32 and 64"),
    ("rwkv7", {"value_dim": [32], "head_dim": 16}, "1 entries for num_hidden_layers=3"),
    ("rwkv7", {"head_dim": 24}, "1 heads of 24 channels"),
    ("rwkv7", {"head_dim": None}, "head_dim and num_heads"),
    ("rwkv7", {"head_dim": 16, "hidden_act": "swish"}, "hidden_act='swish' must be 'sqrelu'"),
    ("rwkv6", {"num_heads": 5}, "num_heads=5"),
    ("rwkv6", {"elementwise_affine": False}, "elementwise_affine"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


def before(x):
    """The token before each, (N,hidden); zeros before the first."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def normalized(x, groups, weight, bias, eps):
    """Group norm of x (N,channels), each token alone."""
    parts = x.view(len(x), groups, -1)
    parts = parts - parts.mean(-1, keepdim=True)
    return (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).view_as(x) * weight + bias


def rwkv6(w, x, count):
    """The attention of RWKV-6 on x (N,hidden); ``w`` returns a weight by name."""
    delta = before(x) - x
    low = (torch.tanh((x + delta * w("x_proj.0.mu")) @ w("x_proj.0.linear.weight").T)).chunk(5, 1)
    second = w("x_proj.2.weight").chunk(5, 1)
    r, d, k, v, g = (
        x + delta * (part @ matrix.T + bias) for part, matrix, bias in zip(low, second, w("x_bias"), strict=True)
    )
    r, k, v, g = (t @ w(f"{name}_proj.linear.weight").T for name, t in zip("rkvg", (r, k, v, g), strict=True))
    d = torch.tanh(d @ w("w_proj.linear.lora.0.weight").T) @ w("w_proj.linear.lora.2.weight").T
    d = (-(d + w("w_proj.linear.lora.2.bias")).exp()).exp().view(len(x), count, -1)
    r, k, v = (t.view(len(x), count, -1) for t in (r, k, v))
    state, rows = torch.zeros(count, k.shape[2], v.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        new = k[t, :, :, None] * v[t, :, None]
        rows.append(torch.einsum("hd,hde->he", r[t], state + w("bonus")[..., None] * new).flatten())
        state = d[t, ..., None] * state + new
    o = normalized(torch.stack(rows), count, w("g_norm.weight"), w("g_norm.bias"), 1e-5)
    return (o * g * g.sigmoid()) @ w("o_proj.weight").T


def rwkv6_ffn(w, x):
    delta = before(x) - x
    k = ((x + delta * w("key.mu")) @ w("key.linear.weight").T).clamp(min=0) ** 2
    gate = (x + delta * w("receptance.mu")) @ w("receptance.linear.weight").T
    return gate.sigmoid() * (k @ w("value.weight").T)


def rwkv7(w, x, count, first, fused, eps=None):
    """The attention of RWKV-7 on x (N,hidden), and its values; ``first`` are the values of layer 0.

    ``eps`` is that of the group norm; None is that of flash-linear-attention.
    """
    delta = before(x) - x

    def low(name, t, act):
        return act(t @ w(f"{name}_lora.lora.0.weight").T) @ w(f"{name}_lora.lora.2.weight").T

    r, d, k, v, a, g = (x + delta * w(f"x_{name}")[0] for name in "rwkvag")
    gate = low("g", g, torch.sigmoid)
    d = -F.softplus(-(low("w", d, torch.tanh) + w("w_lora.lora.2.bias"))) - 0.5
    a = (low("a", a, lambda t: t) + w("a_lora.lora.2.bias")).sigmoid()
    r, k, own = r @ w("r_proj.weight").T, k @ w("k_proj.weight").T, v @ w("v_proj.weight").T
    if first is None:
        first = own
    else:
        share = (low("v", v, lambda t: t) + w("v_lora.lora.2.bias")).sigmoid()
        own = own + (first - own) * share
    removal = (k * w("k_k")).view(len(x), count, -1)
    square = removal.square().sum(-1, keepdim=True)
    removal = removal / (square + 1e-6).sqrt() if fused else removal / square.sqrt().clamp(min=1e-12)
    k = k * (1 + (a - 1) * w("k_a"))
    decay = (-d.exp()).exp()
    r, k, v, a, decay = (t.view(len(x), count, -1) for t in (r, k, own, a, decay))
    state, rows = torch.zeros(count, k.shape[2], v.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        seen = torch.einsum("hde,hd->he", state, removal[t])
        state = decay[t, ..., None] * state - (removal[t] * a[t])[..., None] * seen[:, None]
        state = state + k[t, ..., None] * v[t, :, None]
        rows.append(torch.einsum("hd,hde->he", r[t], state).flatten())
    o = normalized(torch.stack(rows), count, w("g_norm.weight"), w("g_norm.bias"), eps or 1e-5 * k.shape[2])
    bonus = ((r * k * w("r_k")).sum(-1, keepdim=True) * v).flatten(1)
    return ((o + bonus) * gate) @ w("o_proj.weight").T, first


def rwkv7_ffn(w, x):
    return (((x + (before(x) - x) * w("x_k")) @ w("key.weight").T).clamp(min=0) ** 2) @ w("value.weight").T


def layer_norm(w, x):
    bias = w("bias") if w("bias") is not None else 0.0
    return F.layer_norm(x, x.shape[1:], eps=1e-5) * w("weight") + bias


def reader(weights, prefix):
    return lambda name: weights.get(f"{prefix}.{name}")


def logits(name, weights, ids, options, eps=None):
    """The logits of a model, from the definitions of its layers."""
    x, first = weights["model.embeddings.weight"][ids], None
    if options.get("norm_first", True):
        x = layer_norm(reader(weights, "model.layers.0.pre_norm"), x)
    hidden = x.shape[1]
    for layer in range(3):
        attn, attn_norm, ffn, ffn_norm = (
            reader(weights, f"model.layers.{layer}.{part}") for part in ("attn", "attn_norm", "ffn", "ffn_norm")
        )
        if name == "rwkv6":
            x = x + rwkv6(attn, layer_norm(attn_norm, x), options["num_heads"])
            x = x + rwkv6_ffn(ffn, layer_norm(ffn_norm, x))
        else:
            count = options.get("num_heads") or hidden // options["head_dim"]
            y, first = rwkv7(attn, layer_norm(attn_norm, x), count, first, options.get("fuse_norm", True), eps)
            x = x + y
            x = x + rwkv7_ffn(ffn, layer_norm(ffn_norm, x))
    return layer_norm(reader(weights, "model.norm"), x) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("length", [8, 80])
@pytest.mark.parametrize("case", [case for case in CASES if case != "rwkv6-hybrid"])
def test_logits_equal_the_definition(case, length):
    name, options = CASES[case]
    model = build(name, **options).double()
    ids = torch.arange(length) * 5 % 41
    with torch.no_grad():
        close(model(ids[None]).logits[0], logits(name, model.state_dict(), ids, options), 1e-11)


def test_the_eps_of_the_two_norms_differs():
    """A key of length 1e-3 has length 1 / sqrt(2) after the fused norm, and 1 after the other."""
    fused, other = (build("rwkv7", head_dim=16, fuse_norm=value).model.layers[0].attn for value in (True, False))
    k = torch.tensor([6e-4, -8e-4])
    close(fused.unit(k).norm(), torch.tensor(0.5**0.5))
    close(other.unit(k).norm(), torch.tensor(1.0))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", ["rwkv6", "rwkv7"])
def test_checkpointing_changes_no_gradient(case, reentrant):
    name, options = CASES[case]
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
    ranks = {"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 7}
    model = build("rwkv7", hidden_size=64, head_dim=64, fuse_norm=False, norm_first=norm_first, **ranks)
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
    ranks = {"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 7}
    model = build("rwkv7", hidden_size=64, head_dim=64, fuse_norm=False, **ranks)
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
    ids = torch.arange(20) * 5 % 41
    with torch.no_grad():
        found, expected = loaded(ids[None]).logits[0], logits("rwkv7", model.state_dict(), ids, options, 64e-5)
        close(found, expected, 1e-11)
        assert (model(ids[None]).logits[0] - expected).abs().max() > 1e-4
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
    torch.save(weights | {"blocks.0.ffn.s_emb.weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"blocks\.0\.ffn\.s_emb\.weight.*DeepEmbed"):
        fla.load(path)
    torch.save({name: t for name, t in weights.items() if name != "blocks.0.att.r_k"}, path)
    with pytest.raises(ValueError, match=r"blocks\.0\.att\.r_k"):
        fla.load(path)
    torch.save({name: t for name, t in weights.items() if name != "blocks.2.att.ln_x.bias"}, path)
    with pytest.raises(ValueError, match=r"model\.layers\.2\.attn\.g_norm\.bias"):
        fla.load(path)
    torch.save([1], path)
    with pytest.raises(ValueError, match="state dict"):
        fla.load(path)
    path.write_bytes(b"no file of torch")
    with pytest.raises(ValueError, match="cannot load"):
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


@pytest.mark.parametrize("case", ["rwkv6", "rwkv7"])
def test_a_masked_token_changes_no_state(case):
    name, options = CASES[case]
    model = build(name, **options)
    with torch.no_grad():
        cache = cache_of(model(IDS, use_cache=True))
        expected = model(torch.cat([IDS, IDS[:, :1]], 1)).logits[:, -1]
        mask = torch.ones(2, IDS.shape[1] + 1)
        mask[0, -1] = 0
        model(IDS[:, 5:6], cache=cache, attention_mask=mask)
        close(model(IDS[:, :1], cache=cache).logits[0, -1], expected[0])
