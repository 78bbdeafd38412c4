"""GLA checkpoints of flash-linear-attention."""

import pytest
import torch
import torch.nn.functional as F

from fla_laws import IDS, build, close, shared_tests
from longspan.compat import fla
from longspan.compat.fla.models.mixer import Call

CASES = {
    "plain": ("gla", {"num_heads": 2}),
    "shared": (
        "gla",
        {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "clamp_min": -0.05, "feature_map": "relu"},
    ),
    "hybrid": ("gla", {"num_heads": 2, "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 5}}),
}
REFUSED = [
    ("gla", {"use_gv": True}, "use_gv"),
    ("gla", {"attnres_block_size": 2}, "attnres_block_size=2"),
    ("gla", {"new_option": 3}, "new_option=3"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


@pytest.mark.whole
@pytest.mark.parametrize("lowest", [None, -0.045])
def test_first_layer_equals_the_recurrence(lowest):
    """Layer 0 against S = Diag(e^g) S + k v^T, token by token."""
    model = build("gla", num_heads=2, clamp_min=lowest).double()
    layer, weights = model.model.layers[0].attn, model.state_dict()
    x = torch.randn(1, 7, 32, dtype=torch.float64)

    def w(name):
        return weights[f"model.layers.0.attn.{name}"]

    q, k, v, gate = (x[0] @ w(f"{name}_proj.weight").T for name in "qkvg")
    decay = F.logsigmoid(x[0] @ w("gk_proj.0.weight").T @ w("gk_proj.1.weight").T + w("gk_proj.1.bias")) / 16
    if lowest is not None:
        assert decay.min() < lowest < decay.max()
        decay = decay.clamp(min=lowest)
    outputs = []
    for head in range(2):
        keys, values = slice(8 * head, 8 * head + 8), slice(16 * head, 16 * head + 16)
        state = torch.zeros(8, 16, dtype=torch.float64)
        rows = []
        for t in range(7):
            state = decay[t, keys].exp()[:, None] * state + k[t, keys, None] * v[t, None, values]
            o = state.T @ q[t, keys] / 8**0.5
            o = o / (o.square().mean() + 1e-6).sqrt() * w("g_norm_swish_gate.weight")
            rows.append(o * F.silu(gate[t, values]))
        outputs.append(torch.stack(rows))
    expected = torch.cat(outputs, -1) @ w("o_proj.weight").T
    close(layer(x, None, Call())[0][0], expected, 1e-12)


def test_weights_of_another_shape_are_refused(tmp_path):
    model = build("gla", num_heads=2)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:, :-1].clone())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        fla.load(tmp_path)


def test_unknown_types_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "cyclic_flow_attention"}')
    with pytest.raises(ValueError, match="rotating slots"):
        fla.load(tmp_path)


def test_auto_classes_find_the_model(tmp_path):
    from transformers import AutoModelForCausalLM

    model = build("gla", num_heads=2)
    model.save_pretrained(tmp_path)
    fla.register()
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)
