"""Mamba-3 checkpoints of flash-linear-attention."""

import math

import pytest
import torch
import torch.nn.functional as F

from fla_laws import built, close, named_early, shared_tests
from longspan.compat.fla.models.mixer import Call

OPTIONS = {
    "plain": {"head_dim": 16, "state_size": 8},
    "groups": {"head_dim": 16, "state_size": 6, "n_groups": 2, "use_bias": True, "A_floor": 0.4, "norm_eps": 1e-2},
    "normed": {"head_dim": 8, "state_size": 5, "expand": 1, "rope_fraction": 1.0, "is_outproj_norm": True},
}
SMALL = {"intermediate_size": None, "head_dim": 16, "state_size": 8}
CASES = {case: ("mamba3", {"intermediate_size": None, "num_hidden_layers": 2} | own) for case, own in OPTIONS.items()}
REFUSED = [
    ("mamba3", SMALL | {"is_mimo": True}, "is_mimo=True must be False"),
    ("mamba3", SMALL | {"rope_fraction": 0.75}, "rope_fraction=0.75 must be 0.5 or 1.0"),
    ("mamba3", SMALL | {"state_size": 3}, "state_size=3 with rope_fraction=0.5"),
    ("mamba3", SMALL | {"A_floor": 0.0}, "A_floor=0.0 must be positive"),
    ("mamba3", SMALL | {"num_heads": 3}, r"expand \* hidden_size = 64"),
    ("mamba3", SMALL | {"head_dim": 24}, "head_dim=24"),
    ("mamba3", SMALL | {"n_groups": 3}, "n_groups=3 must divide 4 heads"),
    ("mamba3", SMALL | {"attn": {"layers": [0], "num_heads": 2}}, "attn=.* must be None"),
    ("mamba3", SMALL | {"intermediate_size": 48}, "intermediate_size=48"),
    ("mamba3", SMALL | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", OPTIONS)
def test_layers_equal_the_recurrence(case, tokens):
    """The rule with three terms token by token, with complex numbers for the rotations."""
    options = {"n_groups": 1, "expand": 2, "norm_eps": 1e-5, "rope_fraction": 0.5, "A_floor": 1e-4} | OPTIONS[case]
    layer = built(CASES[case]).double().model.layers[1].mixer
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    width, size, keys, groups = options["expand"] * 32, options["head_dim"], options["state_size"], options["n_groups"]
    count, pairs = width // size, int(keys * options["rope_fraction"]) // 2
    mixed = F.linear(x, layer.in_proj.weight, layer.in_proj.bias)
    z, v, b, c, dt, rate, trap, angle = mixed.split(
        [width, width, groups * keys, groups * keys, count, count, count, pairs], -1
    )
    dt = F.softplus(dt + layer.dt_bias)
    decay = torch.exp(torch.clamp(-F.softplus(rate), max=-options["A_floor"]) * dt)
    trap = trap.sigmoid()
    theta = (math.pi * dt[..., None] * angle.tanh()[:, None]).cumsum(0)

    def prepared(t, norm, bias):
        t = F.rms_norm(t.unflatten(-1, (groups, keys)), (keys,), norm.weight, options["norm_eps"])
        t = t.repeat_interleave(count // groups, 1) + bias[:, 0]
        turned = torch.view_as_complex(t[..., : 2 * pairs].unflatten(-1, (pairs, 2)).contiguous())
        turned = torch.view_as_real(turned * torch.polar(torch.ones_like(theta), theta)).flatten(-2)
        return torch.cat([turned, t[..., 2 * pairs :]], -1)

    k, q = prepared(b, layer.B_norm, layer.B_bias), prepared(c, layer.C_norm, layer.C_bias)
    v = v.unflatten(-1, (count, size))
    state = pair = torch.zeros(count, keys, size, dtype=torch.float64)
    rows = []
    for t in range(tokens):
        a, step, share = (s[t, :, None, None] for s in (decay, dt, trap))
        new = k[t, :, :, None] * v[t, :, None]
        state, pair = a * state + (1 - share) * step * a * pair + share * step * new, new
        rows.append((state * q[t, :, :, None]).sum(-2) + layer.D[:, None] * v[t])
    y = torch.stack(rows)
    if options.get("is_outproj_norm"):
        y = F.rms_norm(y, (size,), None, options["norm_eps"]) * layer.norm.weight.view(count, size)
    expected = F.linear(y.flatten(1) * F.silu(z), layer.out_proj.weight, layer.out_proj.bias)
    close(layer(x[None], None, Call())[0][0], expected, 1e-10)


def test_the_floor_of_the_decay_matters():
    """In one of the cases above some rates are below the floor, and some above."""
    rates = F.softplus(built(CASES["groups"]).model.layers[0].mixer.in_proj(torch.randn(9, 32))[:, -9:-5])
    assert 0 < (rates < 0.4).float().mean() < 1


def test_the_early_name_of_the_embedding_is_read(tmp_path):
    named_early(built(CASES["plain"]), tmp_path)
