"""Every recurrent layer of the installed transformers runs on our kernels, or ``status()`` says why it does not."""

import ast
import functools
import re
from pathlib import Path

import pytest

from hybrids import KINDS, file, model, version
from longspan.compat import transformers as on_cpu
from longspan.compat.transformers.models import INDEXERS, MODELS, UNSERVED, UNSERVED_LAYERS, WRAPPERS

STATES = re.compile(
    r"\b(get_conv_state|update_conv_state|get_recurrent_state|update_recurrent_state|set_linear_cache)\b"
)
STATEFUL = re.compile(STATES.pattern + r"|\b_is_stateful = True")
NAMES = re.compile(
    r"ShortConv\w*|\w+(DeltaNet|DeltaAttention|LightningAttention|Mamba2?Mixer|MambaLayer|RecurrentBlock|Rglru)\b"
    r"|(xLSTMBackend|RwkvSelfAttention|RwkvFeedForward)\b"
)
# What says which text model a model is built around.
INNER = re.compile(r'model_type="(\w+)"')

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("restored")


def folder():
    import transformers

    return Path(transformers.__file__).parent / "models"


@functools.cache
def layers():
    """The recurrent layers of the installed transformers by model type: the source of each class by its name."""
    found = {}
    for path in sorted(folder().glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if STATEFUL.search(source):
            found[path.parent.name] = {}
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)) if STATES.search(source) or NAMES.search(source) else ():
            if isinstance(node, ast.ClassDef) and not node.name.endswith("Cache"):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if STATES.search(text) or NAMES.search(node.name):
                    found.setdefault(path.parent.name, {})[node.name] = text
    return found


def is_replaced(kind, name, source):
    functions = MODELS[WRAPPERS.get(kind, kind)].layer.functions
    return any(one.startswith(f"{name}.") or re.search(rf"\b{one}\(", source) for one in functions)


def test_every_recurrent_layer_is_served_or_named():
    found = layers()
    assert len(found) > 20
    for kind, classes in found.items():
        if kind in UNSERVED:
            continue
        assert kind in {*MODELS, *WRAPPERS}
        for name, source in classes.items():
            assert f"{kind}.{name}" in UNSERVED_LAYERS or is_replaced(kind, name, source), (kind, name)


def test_nothing_is_named_that_is_not_there():
    if version() < (5, 24):
        pytest.skip("these transformers lack some of the types")
    found = layers()
    assert {*MODELS, *UNSERVED} <= found.keys()
    assert UNSERVED_LAYERS.keys() <= {f"{kind}.{layer}" for kind, classes in found.items() for layer in classes}


def test_models_around_a_text_model_are_known():
    known = {kind for kind in MODELS if kind in layers()}
    for path in sorted(folder().glob("*/configuration_*.py")):
        for inner in INNER.findall(path.read_text(encoding="utf-8")):
            kind = inner.removesuffix("_text")
            if kind in known and kind != path.parent.name:
                assert WRAPPERS.get(path.parent.name) == kind


def test_status_says_which_parts_are_served():
    if version() < (5, 24):
        pytest.skip("these transformers lack some of the types")
    status = on_cpu.accelerate()
    assert status.parts.keys() == {*MODELS, *WRAPPERS, *INDEXERS}
    assert status.parts["lfm2"] == "short convolutions"
    assert status.parts["lfm2_vl"] == "of its text model lfm2: short convolutions"
    assert "short convolutions" in status.parts["nemotron_h_omni"]
    assert "Mamba-2" in status.parts["nemotron_h_omni"]
    assert status.untouched.keys() >= {*UNSERVED, "inkling2.Inkling2DynamicShortConvolution"}
    # The text lists what is in use.
    assert not any(f"{kind}: {part}" in str(status) for kind, part in status.parts.items())


def test_a_model_of_one_type_names_its_own_parts():
    kind = "inkling2" if version() >= (5, 24) else "qwen3_next"
    status = on_cpu.accelerate(model(kind))
    assert kind in status.parts
    assert "bamba" not in status.parts
    assert ("inkling2.Inkling2DynamicShortConvolution" in status.untouched) == (kind == "inkling2")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if MODELS[kind].since == (5, 24)])
def test_older_versions_are_left_alone_and_named(kind, monkeypatch):
    import transformers

    module, made = file(kind), model(kind)
    before = dict(vars(module))
    monkeypatch.setattr(transformers, "__version__", "5.23.0")
    assert "5.24" in on_cpu.accelerate(made).untouched[kind]
    assert dict(vars(module)) == before
