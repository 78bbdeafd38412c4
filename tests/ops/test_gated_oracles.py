"""Decay and the delta rule agree with the layers of transformers, which share nothing with ours."""

import importlib.util
import warnings

import pytest
import torch

import longspan
from longspan.ops.gated.decays import log_decay


def assert_same(found, expected, tolerance=2e-5):
    """Up to float32's rounding along the tokens."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=tolerance, rtol=tolerance)


def transformers(model):
    """The code of one of transformers' models."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip('needs: pip install "transformers>=5"')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ModuleNotFoundError as error:
            pytest.skip(f"these transformers have no {model}: {error}")


def config(model, name, **options):
    module = transformers(model)
    return module, getattr(module, f"{name}Config")(**options)


X = torch.randn(2, 67, 24, generator=torch.Generator().manual_seed(1))


def lively(module):
    """Weights large enough that every part of the layer matters to its output."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 4)
    return module


class TestWholeLayers:
    """The layers of published models, given our weights."""

    def test_gated_deltanet_is_qwen3_nexts(self):
        module, shape = config(
            "qwen3_next",
            "Qwen3Next",
            hidden_size=24,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=6,
            rms_norm_eps=1e-5,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        )
        ours = lively(longspan.build("gated_deltanet(key_heads=2, expand_k=2.0, expand_v=1.0)", 24, 4))
        theirs = module.Qwen3NextGatedDeltaNet(shape, 0)
        # Theirs has one matrix with the rows of each key head together.
        rows = [w.weight.unflatten(0, (2, -1)) for w in (ours.query, ours.key, ours.value, ours.out_gate)]
        rates = [w.weight.unflatten(0, (2, -1)) for w in (ours.rate, ours.decay)]
        weights = {
            "in_proj_qkvz.weight": torch.cat(rows, 1).flatten(0, 1),
            "in_proj_ba.weight": torch.cat(rates, 1).flatten(0, 1),
            "conv1d.weight": ours.mix.weight[:, None],
            "A_log": ours.a_log,
            "dt_bias": ours.dt_bias,
            "norm.weight": ours.norm.weight,
            "out_proj.weight": ours.out.weight,
        }
        theirs.load_state_dict(weights)
        assert_same([ours(X)[0]], [theirs(X)])

    def test_kda_is_kimi_linears(self):
        module, shape = config(
            "kimi_linear", "KimiLinear", hidden_size=24, linear_num_heads=4, linear_head_dim=6, num_hidden_layers=2
        )
        ours = lively(longspan.build("kda", 24, 4))
        theirs = module.KimiLinearDeltaAttention(shape, 0)
        names = {
            "q_proj": ours.query,
            "k_proj": ours.key,
            "v_proj": ours.value,
            "b_proj": ours.rate,
            "o_proj": ours.out,
            "o_norm": ours.norm,
            "forget_gate.f_a_proj": ours.decay[0],
            "forget_gate.f_b_proj": ours.decay[1],
            "g_a_proj": ours.out_gate[0],
            "g_b_proj": ours.out_gate[1],
        }
        weights = {f"{name}.weight": part.weight for name, part in names.items()}
        weights |= {
            "conv1d.weight": ours.mix.weight[:, None],
            "forget_gate.A_log": ours.a_log[None, None],
            "forget_gate.dt_bias": ours.dt_bias.flatten(),
        }
        theirs.load_state_dict(weights)
        assert_same([ours(X)[0]], [theirs(X)])

    def test_kdas_bounded_decay_is_glms(self):
        module = transformers("glm5_next")
        shape = type(
            "Shape", (), {"hidden_size": 24, "linear_head_dim": 6, "linear_num_heads": 4, "linear_lower_bound": -5.0}
        )
        ours = lively(longspan.build("kda(lower_bound=-5.0)", 24, 4))
        theirs = module.Glm5NextTextForgetGate(shape)
        weights = {"f_a_proj.weight": ours.decay[0].weight, "f_b_proj.weight": ours.decay[1].weight}
        theirs.load_state_dict(weights | {"A_log": ours.a_log.flatten(), "dt_bias": ours.dt_bias.flatten()})
        logit = ours.decay(X).unflatten(-1, (ours.heads, -1))
        decay = log_decay(ours.a_log, logit, ours.dt_bias, ours.lower_bound)
        assert_same([decay], [theirs(X)])
