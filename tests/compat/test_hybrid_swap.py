"""What accelerate replaces in transformers, what it leaves unchanged, and what it reports."""

import functools
import importlib
import subprocess
import sys

import pytest
import torch

from hybrids import KINDS, WHOLE, file, model, served, tokens, version
from longspan.compat import transformers as on_cpu
from longspan.compat.transformers import delta, record
from longspan.compat.transformers.models import MODELS, Layer, Model

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("restored")


def functions(kind):
    names = (*MODELS[kind].layer.functions, "create_causal_mask")
    owners = [(file(kind), *name.split(".")) for name in names]
    return {where: functools.reduce(lambda owner, name: vars(owner).get(name), where) for where in owners}


@pytest.mark.parametrize("kind", KINDS)
def test_restore_puts_everything_back(kind):
    served(kind)
    before, classes = (
        functions(kind),
        {n: c.__dict__.get("forward") for n, c in vars(file(kind)).items() if isinstance(c, type)},
    )
    on_cpu.accelerate()
    assert functions(kind) != before
    on_cpu.restore()
    assert functions(kind) == before
    assert {n: c.__dict__.get("forward") for n, c in vars(file(kind)).items() if isinstance(c, type)} == classes
    assert on_cpu.status() == on_cpu.Status({}, {})
    assert str(on_cpu.status()).startswith("nothing is replaced")


def test_restore_takes_methods_from_a_cache_that_inherits_them():
    cache = file("minimax").MiniMaxCache
    before = dict(vars(cache))
    on_cpu.accelerate()
    assert "get_seq_length" in vars(cache)
    on_cpu.restore()
    assert dict(vars(cache)) == before


def test_a_second_call_changes_nothing_and_a_model_names_its_own_type_alone():
    made = model("qwen3_next")
    first = on_cpu.accelerate(made)
    assert list(first.functions) == ["qwen3_next"]
    now = functions("qwen3_next")
    assert on_cpu.accelerate(made) == first
    assert functions("qwen3_next") == now
    both = on_cpu.accelerate()
    assert set(both.functions) | set(both.untouched) >= set(KINDS)
    missing = {"kimi_linear", "bailing_hybrid"} | (set(WHOLE) if version() < (5, 15) else set())
    assert set(both.untouched) & set(KINDS) <= missing


def test_what_is_not_known_stays_untouched_and_is_named():
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    assert on_cpu.accelerate(plain).untouched.keys() == {"llama"}
    assert "zaya" in on_cpu.accelerate().untouched


def test_layers_that_forget_a_cache_are_named(monkeypatch):
    made = model("qwen3_next")
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "5.6.0")
    assert "5.7" in on_cpu.accelerate(made).untouched["qwen3_next.cache"]
    on_cpu.restore()
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "5.7.0")
    assert "qwen3_next.cache" not in on_cpu.accelerate(made).untouched


def test_a_function_with_an_unknown_parameter_is_left_alone(monkeypatch):
    module = file("kimi_linear")

    def newer(query, key, value, g, beta, allow_half=False, **kwargs):
        return "theirs"

    monkeypatch.setattr(module, "chunk_kimi_delta_attention", newer)
    found = on_cpu.accelerate(model("kimi_linear"))
    assert module.chunk_kimi_delta_attention is newer
    assert "allow_half" in found.untouched["kimi_linear.chunk_kimi_delta_attention"]


def test_a_layer_that_keeps_its_functions_is_found_in_a_model():
    """As in transformers before 5.15: attributes set in __init__, which hide what the module has."""
    made = model("qwen3_next")
    calls = []

    def chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
    ):
        calls.append(1)

    layer = made.model.layers[0].linear_attn
    layer.chunk_gated_delta_rule = chunk_gated_delta_rule
    status = on_cpu.accelerate(made)
    name = "Qwen3NextGatedDeltaNet.chunk_gated_delta_rule"
    assert name in status.functions["qwen3_next"]
    q = torch.randn(1, 5, 2, 4)
    o, _ = layer.chunk_gated_delta_rule(q, q, q, -torch.rand(1, 5, 2), torch.rand(1, 5, 2))
    assert o.shape == q.shape
    assert not calls
    kept = layer.chunk_gated_delta_rule
    on_cpu.restore()
    assert layer.chunk_gated_delta_rule is chunk_gated_delta_rule
    kept(q, q, q, -torch.rand(1, 5, 2), torch.rand(1, 5, 2))  # a kept reference to ours runs theirs again
    assert calls == [1]


def test_other_devices_are_left_to_the_original_and_counted():
    on_cpu.accelerate()
    q, decay = torch.empty(1, 5, 2, 4, device="meta"), torch.empty(1, 5, 2, device="meta")
    o, _ = file("qwen3_next").torch_chunk_gated_delta_rule(q, q, q, g=decay, beta=decay)
    assert o.device.type == "meta"
    by = on_cpu.status().functions["qwen3_next"]["torch_chunk_gated_delta_rule"]
    assert list(by.values()) == [1]
    assert all("original" in name and "meta" in name for name in by)


def test_steps_of_another_form_are_left_to_the_original():
    """A decay for each channel and state, which Mamba-2 does not have, but the function could be given."""
    served("mamba2")
    on_cpu.accelerate()
    step, rows = file("mamba2").mamba2_selective_state_update, (2, 3, 4)
    state, x, dt, a = torch.randn(*rows, 5), torch.randn(rows), torch.rand(rows), -torch.rand(3, 4, 5)
    b = torch.randn(2, 1, 5)
    again = state.clone()
    found = step(state, x, dt, a, b, b, None)
    on_cpu.restore()
    assert torch.equal(found, file("mamba2").mamba2_selective_state_update(again, x, dt, a, b, b, None))
    assert torch.equal(state, again)


def test_a_step_without_gradients_leaves_a_state_that_has_some():
    """Caches of transformers before 5.15 keep the very state that a backward pass needs."""
    q, rate = torch.randn(1, 1, 2, 4), torch.rand(1, 1, 2)
    state = torch.randn(1, 2, 4, 4, requires_grad=True) * 2
    before = state.detach().clone()
    with torch.no_grad():
        delta.gated_delta_rule(q, q, q, -rate, rate, initial_state=state, output_final_state=True)
    assert torch.equal(state, before)
    state.square().sum().backward()  # raises after an overwrite


def test_step_sizes_are_clamped():
    served("mamba2")
    on_cpu.accelerate()
    scan, (q, x) = file("mamba2").mamba2_chunk_scan, torch.randn(2, 2, 11, 4, 6)
    dt, a, bias = torch.randn(2, 11, 4), -torch.rand(4), torch.randn(4)
    given = {"chunk_size": 4, "D": torch.randn(4), "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.5, 0.9)}
    ours = scan(x, dt, a, q, q, **given, initial_states=None, return_final_states=True)
    on_cpu.restore()
    theirs = file("mamba2").mamba2_chunk_scan(x, dt, a, q, q, **given, initial_states=None, return_final_states=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_packed_rows_of_a_type_that_is_not_served_are_refused_too(monkeypatch):
    """As of Mamba-2 in transformers before 5.15."""
    monkeypatch.setitem(MODELS, "bamba", Model(Layer("Mamba-2", "", {})))
    why = on_cpu.accelerate(model("bamba")).untouched["bamba"]
    assert "5.15" in why
    made, x = model("bamba"), tokens(1, 9)
    with pytest.raises(ValueError, match=f"BambaForCausalLM .*packed rows: {why}"):
        made(x, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))
    assert made(x, use_cache=False).logits.isfinite().all()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_and_exported_models_run_by_the_original_code():
    made, x = model("qwen3_next", num_hidden_layers=1, layer_types=["linear_attention"]), tokens(1, 9)
    with torch.no_grad():
        wanted = made(x, use_cache=False).logits
    on_cpu.accelerate()
    found = torch.compile(made, backend="eager")(x, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not any(by for by in on_cpu.status().functions["qwen3_next"].values())


@pytest.mark.full
def test_importing_longspan_does_not_import_transformers():
    code = (
        "import sys, longspan, longspan.compat.transformers as t; t.status(); t.restore(); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_old_and_new_versions_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "4.57.6")
    with pytest.raises(ValueError, match=r"transformers 4\.57\.6 .*5\.5"):
        on_cpu.accelerate()
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "5.25.0")
    with pytest.raises(ValueError, match=r"transformers 5\.25\.0 .*5\.24.*'transformers<5\.25'"):
        on_cpu.accelerate()
    monkeypatch.setattr(record, "need", lambda *_: (_ for _ in ()).throw(ImportError("pip install")))
    with pytest.raises(ImportError, match="pip install"):
        on_cpu.accelerate()


def test_something_that_is_no_model_is_refused():
    with pytest.raises(ValueError, match="accelerate .*str"):
        on_cpu.accelerate("qwen3_next")
