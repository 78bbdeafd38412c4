"""Checkpoints of flash-linear-attention whose layers have a delta rule."""

import pytest
import torch
import torch.nn.functional as F

from fla_laws import build, close, convolved, rms, shared_tests
from longspan.compat.fla.models.mixer import Call

SMALL = {"num_heads": 2, "head_dim": 8}
CASES = {
    "delta_net": ("delta_net", {"num_heads": 2}),
    "delta_net-sum": (
        "delta_net",
        {"num_heads": 2, "qk_norm": "sum", "qk_activation": "elu", "use_gate": True, "allow_neg_eigval": True},
    ),
    "delta_net-bare": ("delta_net", {"num_heads": 2, "use_short_conv": False, "use_beta": False}),
    "gated_deltanet": ("gated_deltanet", SMALL),
    "gated_deltanet-shared": (
        "gated_deltanet",
        SMALL | {"num_v_heads": 4, "expand_v": 1.0, "allow_neg_eigval": True, "output_gate_activation": "sigmoid"},
    ),
    "gated_deltanet-hybrid": (
        "gated_deltanet",
        SMALL | {"use_gate": False, "attn": {"layers": [0, 2], "num_heads": 4, "qk_norm": True, "qkv_bias": True}},
    ),
    "kda": ("kda", SMALL),
    "kda-bounded": ("kda", SMALL | {"num_v_heads": 4, "expand_v": 1.5, "safe_gate": True, "lower_bound": -2.0}),
    "gated_deltaproduct": ("gated_deltaproduct", SMALL | {"num_householder": 3, "use_forget_gate": True}),
    "gated_deltaproduct-plain": (
        "gated_deltaproduct",
        SMALL | {"num_householder": 2, "allow_neg_eigval": True, "use_output_gate": False},
    ),
    "comba": ("comba", SMALL),
    "comba-shared": ("comba", SMALL | {"num_v_heads": 4, "use_output_gate": False}),
    "comba-plain": ("comba", SMALL | {"use_short_conv": False}),
}


REFUSED = [
    ("delta_net", {"num_heads": 2, "qk_norm": "max"}, "max"),
    ("gated_deltanet", SMALL | {"output_gate_activation": "tanh"}, "tanh"),
    ("gated_deltanet", SMALL | {"num_v_heads": 3}, "3"),
    ("kda", SMALL | {"lower_bound": 1.0}, "1.0"),
    ("comba", SMALL | {"expand_v": 0.3}, "expand_v"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


def mixed(layer, x, activation="silu"):
    """q, k, v (N,width) of a layer, from its weights."""
    found = []
    for name in "qkv":
        y = x @ getattr(layer, f"{name}_proj").weight.T
        conv = getattr(layer, f"{name}_conv1d")
        y = y if conv is None else convolved(y, conv.weight)
        found.append(F.silu(y) if activation == "silu" or name == "v" else y)
    return found


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def read(layer, x, rows, gate):
    """The output of a layer from those of its heads, rows (N,H,E)."""
    y = rms(rows, 1e-6, layer.o_norm.weight)
    if gate is not None:
        y = y * gate
    return y.flatten(1) @ layer.o_proj.weight.T


def mamba_decay(layer, x):
    return -layer.A_log.exp() * F.softplus(x @ layer.a_proj.weight.T + layer.dt_bias)


def loop(q, k, v, beta, decay, p=None):
    """S = P + b k (v - P^T k)^T with P = e^g S, token by token; with p, S = P + b k (v - S^T p)^T.

    q, k, p (N,H,D), v (N,H,E), beta (N,H), decay (N,H,1|D).
    """
    n, count, size = k.shape
    state = torch.zeros(count, size, v.shape[-1], dtype=v.dtype)
    rows = []
    for t in range(n):
        after = decay[t].exp()[..., None] * state
        error = v[t] - torch.einsum("hde,hd->he", *((after, k[t]) if p is None else (state, p[t])))
        state = after + beta[t][:, None, None] * k[t][..., None] * error[:, None]
        rows.append(torch.einsum("hde,hd->he", state, q[t]) / size**0.5)
    return torch.stack(rows)


def delta_net(layer, x, options):
    activation = options.get("qk_activation", "silu")
    q, k, v = (t.unflatten(-1, (2, -1)) for t in mixed(layer, x, activation))
    if activation == "elu":
        q, k = (torch.where(t > 0, t + 1, t.exp()) for t in (q, k))
    if options.get("qk_norm", "l2") == "l2":
        q, k = unit(q), unit(k)
    else:
        q, k = (t / t.abs().sum(-1, keepdim=True) for t in (q, k))
    beta = torch.ones(len(x), 2).double() if layer.b_proj is None else (x @ layer.b_proj.weight.T).sigmoid()
    beta = beta * (2 if options.get("allow_neg_eigval") else 1)
    rows = loop(q, k, v, beta, torch.zeros(len(x), 2, 1).double())
    gate = F.silu(x @ layer.g_proj.weight.T).view_as(rows) if options.get("use_gate") else None
    return read(layer, x, rows, gate)


def gated_deltanet(layer, x, options):
    count = options.get("num_v_heads", 2)
    q, k, v = mixed(layer, x)
    q, k = (unit(t.unflatten(-1, (2, -1))).repeat_interleave(count // 2, 1) for t in (q, k))
    beta = (x @ layer.b_proj.weight.T).sigmoid() * (2 if options.get("allow_neg_eigval") else 1)
    rows = loop(q, k, v.unflatten(-1, (count, -1)), beta, mamba_decay(layer, x)[..., None])
    act = torch.sigmoid if options.get("output_gate_activation") == "sigmoid" else F.silu
    return read(layer, x, rows, act(x @ layer.g_proj.weight.T).view_as(rows))


def kda(layer, x, options):
    count = options.get("num_v_heads", 2)
    q, k, v = mixed(layer, x)
    q, k = (unit(t.unflatten(-1, (2, -1))).repeat_interleave(count // 2, 1) for t in (q, k))
    f = x @ layer.f_proj[0].weight.T @ layer.f_proj[1].weight.T + layer.dt_bias
    f, rate = f.unflatten(-1, (count, -1)), layer.A_log.exp()[:, None]
    if "lower_bound" in options:
        decay = options["lower_bound"] * (rate * f).sigmoid()
    else:
        decay = -rate * F.softplus(f)
    rows = loop(q, k, v.unflatten(-1, (count, -1)), (x @ layer.b_proj.weight.T).sigmoid(), decay)
    gate = x @ layer.g_proj[0].weight.T @ layer.g_proj[1].weight.T + layer.g_proj[1].bias
    return read(layer, x, rows, gate.sigmoid().view_as(rows))


def gated_deltaproduct(layer, x, options):
    steps, n = options["num_householder"], len(x)
    q, k, v = mixed(layer, x)
    q, k, v = unit(q.view(n, 2, -1)), unit(k.view(n, steps, 2, -1)), v.view(n, steps, 2, -1)
    beta = (x @ layer.b_proj.weight.T).sigmoid().view(n, steps, 2) * (2 if options.get("allow_neg_eigval") else 1)
    state, rows = torch.zeros(2, 8, 16).double(), []
    for t in range(n):
        if options.get("use_forget_gate"):
            state = mamba_decay(layer, x)[t].exp()[:, None, None] * state
        for j in range(steps):
            error = v[t, j] - torch.einsum("hde,hd->he", state, k[t, j])
            state = state + beta[t, j][:, None, None] * k[t, j][..., None] * error[:, None]
        rows.append(torch.einsum("hde,hd->he", state, q[t]) / 8**0.5)
    rows = torch.stack(rows)
    gated = options.get("use_output_gate", True)
    return read(layer, x, rows, F.silu(x @ layer.g_proj.weight.T).view_as(rows) if gated else None)


def comba(layer, x, options):
    count = options.get("num_v_heads", 2)
    q, k, v = mixed(layer, x)
    q, k = (t.unflatten(-1, (2, -1)) for t in (q, k))
    p = k * layer.decay.sigmoid()[:, None]
    q = q - layer.D[:, None] * p
    q, k, p = (unit(t).repeat_interleave(count // 2, 1) for t in (q, k, p))
    beta = (x @ layer.b_proj.weight.T).sigmoid()
    rows = loop(q, k, v.unflatten(-1, (count, -1)), beta, mamba_decay(layer, x)[..., None], p)
    gated = options.get("use_output_gate", True)
    return read(layer, x, rows, (x @ layer.g_proj.weight.T).sigmoid().view_as(rows) if gated else None)


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", [case for case in CASES if "hybrid" not in case])
def test_layers_equal_their_recurrence(case, tokens):
    name, options = CASES[case]
    layer = build(name, **options).double().model.layers[1].attn
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(layer(x[None], None, Call())[0][0], globals()[name](layer, x, options), 1e-10)
