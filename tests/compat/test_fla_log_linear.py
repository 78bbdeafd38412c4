"""Log-linear Mamba-2 checkpoints of flash-linear-attention."""

import pytest
import torch
import torch.nn.functional as F

from fla_laws import IDS, built, close, convolved, named_early, shared_tests
from longspan.compat.fla.models.mixer import Call

OPTIONS = {
    "plain": {"head_dim": 8, "state_size": 6},
    "groups": {
        "head_dim": 16,
        "state_size": 4,
        "n_groups": 2,
        "use_bias": True,
        "use_conv_bias": False,
        "norm_eps": 1e-2,
    },
    "tied": {"head_dim": 32, "state_size": 5, "expand": 1, "tie_word_embeddings": True, "conv_kernel": 3},
}
SMALL = {"intermediate_size": None, "head_dim": 8}
CASES = {
    case: ("log_linear_mamba2", {"intermediate_size": None, "num_hidden_layers": 2} | own)
    for case, own in OPTIONS.items()
}
REFUSED = [
    ("log_linear_mamba2", SMALL | {"D_has_hdim": True}, "D_has_hdim=True must be False"),
    ("log_linear_mamba2", SMALL | {"norm_before_gate": True}, "norm_before_gate=True must be False"),
    ("log_linear_mamba2", SMALL | {"rmsnorm": False}, "rmsnorm=False must be True"),
    ("log_linear_mamba2", SMALL | {"dt_limit": [0.0, 1.0]}, "dt_limit="),
    ("log_linear_mamba2", SMALL | {"num_heads": 3}, r"expand \* hidden_size = 64"),
    ("log_linear_mamba2", SMALL | {"n_groups": 0}, "n_groups=0 must be a positive"),
    ("log_linear_mamba2", SMALL | {"n_groups": 3}, "n_groups=3 must divide 8 heads"),
    ("log_linear_mamba2", SMALL | {"intermediate_size": 48}, "intermediate_size=48"),
    ("log_linear_mamba2", SMALL | {"attnres_block_size": 2}, "attnres_block_size=2"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", OPTIONS)
def test_layers_equal_the_sum_over_pairs(case, tokens):
    options = {"n_groups": 1, "expand": 2, "norm_eps": 1e-5} | OPTIONS[case]
    layer = built(CASES[case]).double().model.layers[1].mixer
    x = torch.randn(tokens, 32, dtype=torch.float64)
    width, groups, keys = options["expand"] * 32, options["n_groups"], options["n_groups"] * options["state_size"]
    count = width // options["head_dim"]
    z, mixed, dt, level = (x @ layer.in_proj.weight.T + (layer.in_proj.bias if options.get("use_bias") else 0)).split(
        [width, width + 2 * keys, count, 15 * count], -1
    )
    mixed = convolved(mixed, layer.conv1d.weight)
    mixed = F.silu(mixed if layer.conv1d.bias is None else mixed + layer.conv1d.bias)
    v, b, c = mixed.split([width, keys, keys], -1)
    v = v.view(tokens, count, -1)
    b, c = (t.view(tokens, groups, -1).repeat_interleave(count // groups, 1) for t in (b, c))
    dt = F.softplus(dt + layer.dt_bias)
    weight = F.softplus(layer.L * level.view(tokens, count, 15))
    rows = []
    for t in range(tokens):
        o = layer.D[:, None] * v[t]
        for s in range(t + 1):
            decay = (-layer.A_log.exp() * dt[s + 1 : t + 1].sum(0)).exp()
            pair = weight[t, :, (t ^ s).bit_length()] * decay * (c[t] * b[s]).sum(-1) * dt[s]
            o = o + pair[:, None] * v[s]
        rows.append(o)
    y = (torch.stack(rows).flatten(1) * F.silu(z)).view(tokens, groups, -1)
    y = (y / (y.square().mean(-1, keepdim=True) + options["norm_eps"]).sqrt()).flatten(1) * layer.norm.weight
    expected = y @ layer.out_proj.weight.T + (layer.out_proj.bias if options.get("use_bias") else 0)
    close(layer(x[None], None, Call())[0][0], expected, 1e-10)


@pytest.mark.parametrize("case", CASES)
def test_the_levels_that_a_text_has_learn(case):
    """23 tokens have 6 of 15 levels."""
    model = built(CASES[case]).train()
    model(IDS, labels=IDS).loss.backward()
    assert model.backbone.layers[0].mixer.L.grad.ne(0).any(0).tolist() == [True] * 6 + [False] * 9


def test_the_early_name_of_the_embedding_is_read(tmp_path):
    named_early(built(CASES["plain"]), tmp_path)
