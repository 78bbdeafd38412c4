"""Checkpoints of flash-linear-attention whose layers attend to slots, or solve a regression for each token."""

import pytest
import torch
import torch.nn.functional as F

from fla_laws import build, close, convolved, rms, shared_tests
from longspan.compat.fla.models.mixer import Call

CASES = {
    "gsa": ("gsa", {"num_heads": 2, "num_slots": 5}),
    "gsa-shared": (
        "gsa",
        {"num_heads": 4, "num_kv_heads": 2, "num_slots": None, "use_short_conv": True, "feature_map": "t2r"},
    ),
    "gsa-relu": ("gsa", {"num_heads": 2, "num_slots": 3, "feature_map": "relu", "gate_logit_normalizer": 2}),
    "abc": ("abc", {"num_heads": 2, "num_slots": 5}),
    "abc-conv": ("abc", {"num_heads": 4, "num_slots": 3, "use_short_conv": True, "use_rope": False, "expand_v": 2.0}),
    "raven": ("raven", {"num_heads": 2, "num_slots": 6, "topk": 2}),
    "raven-shared": (
        "raven",
        {
            **{"num_heads": 4, "num_kv_heads": 2, "num_slots": 6, "topk": 3, "decay_type": "GLA", "use_rope": True},
            **{"router_type": "mlp", "router_score": "softmax", "use_output_gate": True, "expand_v": 2.0},
        },
    ),
    "mesa_net": ("mesa_net", {"num_heads": 2, "head_dim": 8}),
    "mesa_net-gated": ("mesa_net", {"num_heads": 4, "head_dim": 6, "use_output_gate": True, "lambda_lower_bound": 0.5}),
}
REFUSED = [
    ("gsa", {"feature_map": "elu"}, "feature_map"),
    ("gsa", {"expand_v": 2.0}, "expand_v"),
    ("raven", {"topk": 65}, "topk"),
    ("raven", {"router_type": "tree"}, "router_type"),
    ("mesa_net", {"lambda_lower_bound": 0.0}, "lambda_lower_bound"),
    ("mesa_net", {"max_cg_step_decoding": 5}, "max_cg_step_decoding"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


def projected(layer, x, names, conv):
    found = []
    for name in names:
        y = x @ getattr(layer, f"{name}_proj").weight.T
        found.append(F.silu(convolved(y, getattr(layer, f"{name}_conv1d").weight)) if conv else y)
    return found


def to_slots(q, k, v, write, decay, scale):
    """o = V^T softmax(K q) token by token; q, k (N,H,D), v (N,H,E), write, decay (N,H,M)."""
    keys, values, rows = 0.0, 0.0, []
    for t in range(len(q)):
        keys = decay[t].exp()[..., None] * keys + write[t][..., None] * k[t][:, None]
        values = decay[t].exp()[..., None] * values + write[t][..., None] * v[t][:, None]
        shares = (scale * keys @ q[t][..., None]).softmax(1)
        rows.append((shares * values).sum(1))
    return torch.stack(rows)


def turned(x):
    """Rotary positions of x (N,H,D)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    pair = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pair.real, pair.imag], -1)


def mapped(layer, name, x):
    match name:
        case "relu":
            return x.relu()
        case "t2r":
            return (x @ layer.feature_map.layer.weight.T).relu()
        case _:
            return F.silu(x)


def gsa(layer, x, options):
    count, repeats = options["num_heads"], options["num_heads"] // options.get("num_kv_heads", options["num_heads"])
    q, k, v = (t.view(len(x), -1, 32 // count) for t in projected(layer, x, "qkv", options.get("use_short_conv")))
    q, k = (mapped(layer, options.get("feature_map"), t) for t in (q, k))
    decay = F.logsigmoid(x @ layer.f_proj.weight.T).view(len(x), count // repeats, -1)
    decay = decay / options.get("gate_logit_normalizer", 8)
    k, v, decay = (t.repeat_interleave(repeats, 1) for t in (k, F.silu(v), decay))
    o = to_slots(q, k, v, 1 - decay.exp(), decay, 1.0)
    return rms(F.silu(o.flatten(1)), 1e-5, layer.g_norm.weight) @ layer.o_proj.weight.T


def abc(layer, x, options):
    count, rows = options["num_heads"], []
    q, k, v = (t.view(len(x), count, -1) for t in projected(layer, x, "qkv", options.get("use_short_conv")))
    if options.get("use_rope", True):
        q, k = turned(q), turned(k)
    weights = (x @ layer.s_proj.weight.T).view(len(x), count, -1).clamp(-32, 32)
    for t in range(len(x)):
        shares = weights[: t + 1].softmax(0)
        keys, values = (torch.einsum("nhm,nhd->hmd", shares, y[: t + 1]) for y in (k, v))
        scores = torch.einsum("hmd,hd->hm", keys, q[t]) / q.shape[-1] ** 0.5
        rows.append(torch.einsum("hm,hmd->hd", scores.softmax(-1), values))
    o = rms(torch.stack(rows), 1e-6, layer.g_norm.weight)
    return (o * F.silu(x @ layer.g_proj.weight.T).view_as(o)).flatten(1) @ layer.o_proj.weight.T


def raven(layer, x, options):
    count, repeats = options["num_heads"], options["num_heads"] // options.get("num_kv_heads", options["num_heads"])
    q, k, v = projected(layer, x, "qkv", False)
    q, k, v = q.view(len(x), count, -1), k.view(len(x), count // repeats, -1), v.view(len(x), count // repeats, -1)
    q, k = rms(F.silu(q), 1e-6, layer.q_norm.weight), rms(F.silu(k), 1e-6, layer.k_norm.weight)
    if options.get("use_rope"):
        q, k = turned(q), turned(k)
    if options.get("decay_type") == "GLA":
        decay = F.logsigmoid(x @ layer.f_proj.weight.T).view(len(x), count // repeats, -1) / 8
    else:
        decay = (-layer.A_log.exp() * F.softplus(x @ layer.a_proj.weight.T + layer.dt_bias))[..., None]
    if options.get("router_type") == "mlp":
        first, _, last = layer.r_proj
        logits = F.gelu(x @ first.weight.T + first.bias) @ last.weight.T
    else:
        logits = x @ layer.r_proj.weight.T
    logits = logits.view(len(x), count // repeats, -1)
    scores = logits.softmax(-1) if options.get("router_score") == "softmax" else logits.sigmoid()
    biased = scores if layer.r_bias is None else scores + layer.r_bias
    chosen = biased >= biased.sort(-1, descending=True).values[..., options["topk"] - 1, None]
    shares = scores * chosen
    if options.get("router_score") != "softmax":
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-9)
    decay = decay * shares
    k, v, decay = (t.repeat_interleave(repeats, 1) for t in (k, F.silu(v), decay))
    o = F.silu(to_slots(q, k, v, 1 - decay.exp(), decay, 1.0))
    if options.get("use_output_gate"):
        o = rms(o, 1e-6, layer.o_norm.weight) * F.silu(x @ layer.o_gate_proj.weight.T).view_as(o)
        return o.flatten(1) @ layer.o_proj.weight.T
    return rms(o.flatten(1), 1e-6, layer.g_norm.weight) @ layer.o_proj.weight.T


def mesa_net(layer, x, options):
    count, floor, rows = options["num_heads"], options.get("lambda_lower_bound", 0.25), []
    q, k = (t.view(len(x), count, -1) for t in projected(layer, x, "qk", True))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v = (x @ layer.v_proj.weight.T).view_as(q)
    decay, beta = (F.linear(x, project.weight, project.bias).sigmoid() for project in (layer.a_proj, layer.b_proj))
    ridge = torch.diag_embed((F.softplus(layer.lambda_params) + floor).view(count, -1))
    first, second = 0.0, 0.0
    for t in range(len(x)):
        write = beta[t, :, None] * k[t]
        first = decay[t, :, None, None] * first + write[..., None] * k[t][:, None]
        second = decay[t, :, None, None] * second + write[..., None] * v[t][:, None]
        rows.append((torch.linalg.solve(first + ridge, q[t])[:, None] @ second)[:, 0])
    o = rms(torch.stack(rows), 1e-6, layer.o_norm.weight)
    if options.get("use_output_gate"):
        o = o * F.silu(x @ layer.g_proj.weight.T).view_as(o)
    return o.flatten(1) @ layer.o_proj.weight.T


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", [*CASES, "raven-biased"])
def test_layers_equal_their_definition(case, tokens):
    """A bias of the router has no gradient, so it is not among the cases of the laws."""
    name, options = CASES.get(case) or ("raven", {"num_heads": 2, "num_slots": 6, "topk": 2, "bias_rmm": True})
    model = build(name, **options).double()
    layer = model.model.layers[1].attn
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(layer(x[None], None, Call())[0][0], globals()[name](layer, x, options), 1e-9)


def test_a_router_draws_noise_in_training_only():
    model = build("raven", num_heads=2, num_slots=6, topk=2)
    layer, x = model.model.layers[1].attn, torch.randn(1, 9, 32)
    assert layer.shares(x).equal(layer.shares(x))
    layer.train()
    assert not layer.shares(x).equal(layer.shares(x))
