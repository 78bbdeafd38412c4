"""RWKV-6 and RWKV-7 checkpoints of flash-linear-attention."""

import pytest
import torch
import torch.nn.functional as F

from fla_laws import LAWS, build, close, saved
from longspan.compat import fla
from longspan.compat.fla.models.mixer import Call

CASES = {
    "rwkv6": ("rwkv6", {"num_heads": 2}),
    "rwkv6-wide": (
        "rwkv6",
        {"num_heads": 4, "expand_k": 1.0, "expand_v": 0.5, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5}
        | {"norm_first": False, "norm_bias": False},
    ),
    "rwkv6-hybrid": ("rwkv6", {"num_heads": 2, "attn": {"layers": [1], "num_heads": 4, "window_size": 5}}),
}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("case", CASES)
def test_laws(law, case):
    name, options = CASES[case]
    law(build(name, **options))


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded(case, tmp_path):
    name, options = CASES[case]
    saved(build(name, **options), tmp_path)


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


def layer_norm(w, x):
    bias = w("bias") if w("bias") is not None else 0.0
    return F.layer_norm(x, x.shape[1:], eps=1e-5) * w("weight") + bias


def reader(weights, prefix):
    return lambda name: weights.get(f"{prefix}.{name}")


def forms(name, weights, layer, options):
    """The attention and the feed-forward of a layer, from their definitions."""
    attn, ffn = (reader(weights, f"model.layers.{layer}.{part}") for part in ("attn", "ffn"))
    return lambda x: rwkv6(attn, x, options["num_heads"]), lambda x: rwkv6_ffn(ffn, x)


@pytest.mark.parametrize("length", [8, 80])
@pytest.mark.parametrize("case", ["rwkv6", "rwkv6-wide"])
def test_logits_equal_the_definition(case, length):
    name, options = CASES[case]
    model = build(name, **options).double()
    weights = model.state_dict()
    ids = torch.arange(length) * 5 % 41
    x = weights["model.embeddings.weight"][ids]
    if options.get("norm_first", True):
        x = layer_norm(reader(weights, "model.layers.0.pre_norm"), x)
    for layer in range(3):
        attn, ffn = forms(name, weights, layer, options)
        x = x + attn(layer_norm(reader(weights, f"model.layers.{layer}.attn_norm"), x))
        x = x + ffn(layer_norm(reader(weights, f"model.layers.{layer}.ffn_norm"), x))
    expected = layer_norm(reader(weights, "model.norm"), x) @ weights["lm_head.weight"].T
    with torch.no_grad():
        close(model(ids[None]).logits[0], expected, 1e-11)
