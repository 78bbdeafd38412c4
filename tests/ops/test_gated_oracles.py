"""Decay and the delta rule agree with implementations that share nothing with ours, alone and as whole layers."""

import importlib.util
import warnings

import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan import decay_attention, delta_rule
from longspan.ops.gated.decays import log_decay

N, D, E = 71, 6, 5


def operands(*, groups=4, heads=4, channels=False, n=N, seed=0):
    """float32, as every oracle here computes: q, k (2,G,n,D), v (2,H,n,E), log_decay, beta, a state."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(2, *shape, generator=generator)

    return {
        "query": F.normalize(random(groups, n, D), dim=-1),
        "key": F.normalize(random(groups, n, D), dim=-1),
        "value": random(heads, n, E),
        "log_decay": -random(heads, n, D).abs() / 3 if channels else -random(heads, n).abs() / 3,
        "beta": random(heads, n).sigmoid(),
        "state": random(heads, D, E),
    }


def assert_same(found, expected, tolerance=2e-5):
    """Up to float32's rounding along N tokens."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=tolerance, rtol=tolerance)


class TestOnnx:
    """The reference evaluator of ONNX's LinearAttention, an operator since opset 27."""

    @staticmethod
    def theirs(rule, query, key, value, state, decay=None, beta=None):
        onnx = pytest.importorskip("onnx", reason="needs: pip install onnx")
        if onnx.defs.onnx_opset_version() < 27:
            pytest.skip(f"onnx {onnx.__version__} has no LinearAttention, which came with opset 27")
        from onnx.reference import ReferenceEvaluator

        def flat(t):
            return (t[..., None] if t.dim() == 3 else t).transpose(1, 2).flatten(2).numpy()

        inputs = {"q": flat(query), "k": flat(key), "v": flat(value), "state": state.numpy()}
        inputs |= {name: flat(t) for name, t in (("decay", decay), ("beta", beta)) if t is not None}
        slots = [name if name in inputs else "" for name in ("q", "k", "v", "state", "decay", "beta")]
        heads = value.shape[1]
        node = onnx.helper.make_node(
            "LinearAttention", slots, ["o", "after"], q_num_heads=heads, kv_num_heads=heads, update_rule=rule
        )
        tensor = onnx.helper.make_tensor_value_info
        kind = onnx.TensorProto.FLOAT
        graph = onnx.helper.make_graph(
            [node],
            "one",
            [tensor(name, kind, t.shape) for name, t in inputs.items()],
            [tensor("o", kind, None), tensor("after", kind, None)],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 27)])
        o, after = (torch.from_numpy(t) for t in ReferenceEvaluator(model).run(None, inputs))
        return o.unflatten(-1, (heads, -1)).transpose(1, 2), after

    @pytest.mark.parametrize("channels", [False, True])
    @pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
    def test_rules(self, rule, channels):
        given = operands(channels=channels)
        decay, beta = given.pop("log_decay"), given.pop("beta")
        gated, delta = rule.startswith("gated"), rule.endswith("delta")
        theirs = self.theirs(rule, **given, decay=decay if gated else None, beta=beta if delta else None)
        if delta:
            ours = delta_rule(**given, beta=beta, log_decay=decay if gated else None, return_state=True)
        else:
            none = torch.zeros_like(decay)
            ours = decay_attention(**given, log_decay=decay if gated else none, return_state=True)
        assert_same(ours, theirs)


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

    def test_gated_deltanet_is_olmo_hybrids(self):
        module, shape = config(
            "olmo_hybrid",
            "OlmoHybrid",
            hidden_size=24,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=3,
            linear_value_head_dim=12,
            linear_allow_neg_eigval=True,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
        )
        ours = lively(longspan.build("gated_deltanet(expand_k=0.5, negative=True)", 24, 4))
        theirs = module.OlmoHybridGatedDeltaNet(shape, 0)
        names = {
            "q_proj": ours.query,
            "k_proj": ours.key,
            "v_proj": ours.value,
            "a_proj": ours.decay,
            "b_proj": ours.rate,
            "g_proj": ours.out_gate,
            "o_proj": ours.out,
            "o_norm": ours.norm,
        }
        weights = {f"{name}.weight": part.weight for name, part in names.items()}
        weights |= {"conv1d.weight": ours.mix.weight[:, None], "A_log": ours.a_log, "dt_bias": ours.dt_bias}
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
