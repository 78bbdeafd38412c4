"""Checkpoints of flash-linear-attention whose layers are sums with and without decay."""

import pytest
import torch
import torch.nn.functional as F

from fla_laws import build, close, convolved, rms, shared_tests
from longspan.compat.fla.models.mixer import Call

CASES = {
    "retnet": ("retnet", {"num_heads": 2}),
    "retnet-shared": ("retnet", {"num_heads": 4, "num_kv_heads": 2, "use_output_gate": False, "feature_map": "relu"}),
    "linear_attn": ("linear_attn", {"num_heads": 2}),
    "linear_attn-hedgehog": ("linear_attn", {"num_heads": 2, "feature_map": "hedgehog", "norm_feature_map": True}),
    "linear_attn-t2r": (
        "linear_attn",
        {"num_heads": 4, "num_kv_heads": 2, "feature_map": "t2r", "tie_feature_map_qk": True, "norm_q": True},
    ),
    "linear_attn-tied": (
        "linear_attn",
        {"num_heads": 2, "feature_map": "hedgehog", "tie_feature_map_qk": True, "tie_word_embeddings": True},
    ),
    "linear_attn-dpfp": ("linear_attn", {"num_heads": 2, "feature_map": "dpfp", "norm_k": True}),
    "linear_attn-elu": ("linear_attn", {"num_heads": 2, "feature_map": "elu", "norm_feature_map": True}),
    "hgrn2": ("hgrn2", {"expand_ratio": 16}),
    "hgrn2-free": ("hgrn2", {"expand_ratio": None, "num_heads": 4, "use_lower_bound": False, "use_short_conv": True}),
    "lightnet": ("lightnet", {"expand_ratio": 16}),
    "lightnet-conv": ("lightnet", {"expand_ratio": 8, "num_heads": 2, "use_short_conv": True}),
}


REFUSED = [
    ("retnet", {"feature_map": "tanh"}, "feature_map"),
    ("linear_attn", {"feature_map": "cosine"}, "feature_map"),
    ("hgrn2", {"expand_ratio": 24}, "heads of 24"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


def projected(layer, x, names, conv=False):
    """x W^T for each name (N,width), after a causal convolution where ``conv``."""
    found = []
    for name in names:
        y = x @ getattr(layer, f"{name}_proj").weight.T
        if conv:
            y = convolved(y, getattr(layer, f"{name}_conv1d").weight)
        found.append(y)
    return found


def loop(q, k, v, decay):
    """S = Diag(e^g) S + k v^T token by token; q, k, decay (N,H,D), v (N,H,E)."""
    state, rows = torch.zeros(*k.shape[1:], v.shape[-1], dtype=v.dtype), []
    for t in range(len(k)):
        state = decay[t].exp()[..., None] * state + k[t][..., None] * v[t][:, None]
        rows.append(torch.einsum("hde,hd->he", state, q[t]) / k.shape[-1] ** 0.5)
    return torch.stack(rows)


def retnet(model, layer, x, options):
    count = options["num_heads"]
    repeats = count // options.get("num_kv_heads", count)
    q, k, v = projected(layer, x, "qkv")
    q, k, v = q.view(len(x), count, -1), k.view(len(x), count // repeats, -1), v.view(len(x), count // repeats, -1)
    if options.get("feature_map"):
        q, k = q.relu(), k.relu()
    half = q.shape[-1] // 2
    angles = torch.arange(len(x))[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = (torch.complex(t[..., :half], t[..., half:]) * turn for t in (q, k))
    q, k = (torch.cat([t.real, t.imag], -1) for t in (q, k))
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    rates = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(count)]).double().log()
    o = loop(q, k, v, rates[None, :, None].expand_as(k))
    o = rms(o, 1e-6, layer.get_submodule(layer.norm_name).weight)
    if options.get("use_output_gate", True):
        o = o * F.silu(x @ layer.g_proj.weight.T).view_as(o)
    return o.flatten(1) @ layer.o_proj.weight.T


def linear_attn(model, layer, x, options):
    count = options["num_heads"]
    repeats = count // options.get("num_kv_heads", count)
    q, k, v = (t.view(len(x), -1, 32 // count) for t in projected(layer, x, "qkv"))
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)

    def phi(t, module):
        match options.get("feature_map", "elementwise_product"):
            case "elementwise_product":
                a, b = module.layer1, module.layer2
                return (t @ a.weight.T + a.bias) * (t @ b.weight.T + b.bias)
            case "hedgehog":
                y = (2 * (t @ module.layer.weight.T + module.layer.bias)).exp()
                return torch.cat([y, 1 / y], -1) / (y + 1 / y).sum(-1, keepdim=True)
            case "t2r":
                return (t @ module.layer.weight.T).clamp(min=0)
            case "elu":
                return torch.where(t > 0, t + 1, t.exp())
            case _:
                y = torch.cat([t.clamp(min=0), (-t).clamp(min=0)], -1)
                n = y.shape[-1]
                at = torch.arange(n)
                return torch.cat([y * y[..., (at - j) % n] for j in range(1, 5)], -1)

    q, k = phi(q, layer.feature_map_q), phi(k, layer.feature_map_k)
    q = q / (q.sum(-1, keepdim=True) + 1e-4) if options.get("norm_q") else q
    k = k / (k.sum(-1, keepdim=True) + 1e-4) if options.get("norm_k") else k
    o = loop(q, k, v, torch.zeros_like(k))
    if options.get("norm_feature_map"):
        o = o / ((q * k.cumsum(0)).sum(-1, keepdim=True) / k.shape[-1] ** 0.5 + 1e-10)
    return rms(o, 1e-6, layer.norm.weight).flatten(1) @ layer.o_proj.weight.T


def bound(model, layer):
    shares = model.model.lower_bounds.exp()
    shares = shares / shares.sum(0)
    return shares[1 : layer + 1].sum(0)


def hgrn2(model, layer, x, options):
    q, f, i = projected(layer, x, "qfi", options.get("use_short_conv", False))
    gate = f.sigmoid()
    if options.get("use_lower_bound", True):
        b = bound(model, 1)
        gate = b + (1 - b) * gate
    q, k, decay = (t.view(len(x), layer.heads, -1) for t in (F.silu(q), 1 - gate, gate.log()))
    o = loop(q, k, i.view(len(x), layer.heads, -1), decay).flatten(1)
    return rms(o, 1e-5, layer.g_norm.weight) @ layer.o_proj.weight.T


def lightnet(model, layer, x, options):
    q, k, v = projected(layer, x, "qkv", options.get("use_short_conv", False))
    q, k, v = (t.view(len(x), layer.heads, -1) for t in (F.silu(q), k, v))
    rows = []
    for t in range(len(x)):
        weights = k[: t + 1].softmax(0)
        state = torch.einsum("nhd,nhe->hde", weights, v[: t + 1])
        rows.append(torch.einsum("hde,hd->he", state, q[t]) / q.shape[-1] ** 0.5)
    gate = F.silu(x @ layer.g_proj[0].weight.T @ layer.g_proj[1].weight.T)
    return (rms(torch.stack(rows).flatten(1), 1e-6, layer.g_norm.weight) * gate) @ layer.o_proj.weight.T


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", CASES)
def test_layers_equal_their_definition(case, tokens):
    name, options = CASES[case]
    model = build(name, **options).double()
    layer, call = model.model.layers[1].attn, Call()
    if options.get("use_lower_bound", name == "hgrn2"):
        shares = model.model.lower_bounds.softmax(0)
        call.shared["lower_bounds"] = shares.cumsum(0) - shares[0]
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(layer(x[None], None, call)[0][0], globals()[name](model, layer, x, options), 1e-9)
