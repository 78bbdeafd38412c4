"""Checkpoints of flash-linear-attention whose delta rule is preconditioned."""

import pytest
import torch
import torch.nn.functional as F

from fla_laws import build, close, convolved, rms, shared_tests
from longspan.compat.fla.models.mixer import Call

SMALL = {"num_heads": 2, "head_dim": 8}
SHARED = {"num_heads": 2, "num_v_heads": 4, "head_dim": 6, "allow_neg_eigval": True, "squash_x": 1.2}
CASES = {
    "gated": ("precond_gated_deltanet", SMALL),
    "gated-shared": ("precond_gated_deltanet", SHARED | {"use_gate": False, "use_short_conv": False}),
    "kda": ("precond_kda", SMALL),
    "kda-shared": ("precond_kda", SHARED | {"expand_v": 2.0, "safe_gate": True, "lower_bound": -5.0}),
}
REFUSED = [
    ("precond_gated_deltanet", {"squash_x": 3.0}, "squash_x"),
    ("precond_kda", {"squash_eps": 0.1}, "squash_eps"),
    ("precond_kda", {"safe_gate": True}, "lower_bound"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", CASES)
def test_layers_equal_their_definition(case, tokens):
    name, options = CASES[case]
    layer = build(name, **options).double().model.layers[1].attn
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    count, kda = options.get("num_v_heads", 2), name == "precond_kda"

    def linear(part):
        return F.linear(x, part.weight, part.bias)

    def wide(t):
        """One row for each head of values."""
        return t.repeat_interleave(count // t.shape[1], 1)

    mixed = [linear(getattr(layer, f"{letter}_proj")) for letter in "qkv"]
    if layer.q_conv1d is not None:
        mixed = [
            convolved(t, getattr(layer, f"{letter}_conv1d").weight) for t, letter in zip(mixed, "qkv", strict=True)
        ]
    q, k, v = (F.silu(t) for t in mixed)
    size = options["head_dim"]
    q, k = (wide(t.view(tokens, 2, size)) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v = v.view(tokens, count, -1)
    beta = wide(linear(layer.b_proj).sigmoid()) * (2 if options.get("allow_neg_eigval") else 1)
    fade = linear(layer.a_proj if kda else layer.a_atk_proj)
    fade = wide(-layer.A_log_atk.exp() * F.softplus(fade + layer.dt_bias_atk))
    weight, center = wide(linear(layer.b_atk_proj).sigmoid()), wide(layer.log_atk_scale[None])[0]
    if kda:
        gate = layer.f_proj(x).view(tokens, count, size) + layer.dt_bias.view(count, size)
        rate = layer.A_log.exp()[:, None]
        bound = options.get("lower_bound")
        decay = -rate * F.softplus(gate) if bound is None else bound * (rate * gate).sigmoid()
    else:
        decay = (-layer.A_log.exp() * F.softplus(linear(layer.a_proj) + layer.dt_bias))[..., None]
    state, curvature, rows = torch.zeros(count, size, v.shape[-1], dtype=x.dtype), 0.0, []
    for t in range(tokens):
        curvature = fade[t].exp()[:, None] * curvature + weight[t][:, None] * k[t] ** 2
        u = (curvature + 1e-6).log() - center[:, None]
        write = beta[t][:, None] * k[t] * options.get("squash_x", 1.5) ** (-u / (1 + u.abs()))
        state = decay[t].exp()[..., None] * state
        state = state + write[..., None] * (v[t] - torch.einsum("hde,hd->he", state, k[t]))[:, None]
        rows.append(torch.einsum("hde,hd->he", state, q[t]) / size**0.5)
    o = rms(torch.stack(rows), 1e-6, layer.o_norm.weight)
    if kda:
        o = o * layer.g_proj(x).view_as(o).sigmoid()
    elif options.get("use_gate", True):
        o = o * F.silu(linear(layer.g_proj)).view_as(o)
    with torch.no_grad():
        close(layer(x[None], None, Call())[0][0], o.flatten(1) @ layer.o_proj.weight.T, 1e-9)
