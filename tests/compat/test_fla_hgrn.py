"""HGRN checkpoints of flash-linear-attention."""

import pytest
import torch

from fla_laws import build, close, convolved, shared_tests
from longspan.compat.fla.models.mixer import Call

OPTIONS = {
    "bounded": {},
    "free": {"use_lower_bound": False, "expand_ratio": 2, "use_short_conv": True, "elementwise_affine": False},
    "conv": {"use_short_conv": True, "conv_size": 3, "tie_word_embeddings": True},
}
CASES = {case: ("hgrn", options) for case, options in OPTIONS.items()}
REFUSED = [("hgrn", {"expand_ratio": 2}, "expand_ratio=2 must be 1 with use_lower_bound")]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("number", [0, 2])
def test_layers_equal_the_recurrence(number, case, tokens):
    options = OPTIONS[case]
    model = build("hgrn", **options).double()
    layer, call = model.model.layers[number].attn, Call()
    x = torch.randn(tokens, 32, dtype=torch.float64)
    i, f, gate = (x @ getattr(layer, f"{name}_proj").weight.T for name in "ifg")
    if options.get("use_short_conv"):
        i, f = convolved(i, layer.i_conv1d.weight), convolved(f, layer.f_conv1d.weight)
    keep = f.sigmoid()
    if options.get("use_lower_bound", True):
        shares = model.model.lower_bounds.exp() / model.model.lower_bounds.exp().sum(0)
        bound = shares[1 : number + 1].sum(0)  # 0 in the first layer
        keep = bound + (1 - bound) * keep
        call.shared["lower_bounds"] = torch.stack([shares[1 : n + 1].sum(0) for n in range(3)])
    h, rows = torch.zeros_like(i[0]), []
    for t in range(tokens):
        h = keep[t] * h + i[t] * i[t].sigmoid() * (1 - keep[t])
        o = h / (h.square().mean() + 1e-6).sqrt()
        rows.append(o if layer.g_norm.weight is None else o * layer.g_norm.weight)
    expected = (torch.stack(rows) * gate * gate.sigmoid()) @ layer.o_proj.weight.T
    close(layer(x[None], None, call)[0][0], expected, 1e-10)
