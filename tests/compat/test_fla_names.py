"""Names, shapes and default options are those of flash-linear-attention 0.6.0, recorded from its classes."""

import json
from pathlib import Path

import pytest
import torch

from longspan.compat.fla import models
from longspan.compat.fla.models.config import COMMON

RECORDED = json.loads((Path(__file__).parent / "fla_names.json").read_text(encoding="utf-8"))
CASES = [(name, i) for name, found in RECORDED.items() for i in range(len(found["models"]))]


def shapes(model):
    return {name: list(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.whole
@pytest.mark.parametrize(("name", "case"), CASES)
def test_weights_have_the_names_and_shapes_of_the_original(name, case):
    if name not in models.supported():
        pytest.skip(f"{name} is not supported")
    family, recorded = models.supported()[name], RECORDED[name]["models"][case]
    with torch.device("meta"):
        model = family.model(family.config(**recorded["options"]))
    assert shapes(model) == recorded["shapes"]


@pytest.mark.whole
def test_every_supported_model_type_is_recorded():
    assert set(models.supported()) <= set(RECORDED)


@pytest.mark.whole
@pytest.mark.parametrize("name", RECORDED)
def test_default_options_are_those_of_the_original(name):
    if name not in models.supported():
        pytest.skip(f"{name} is not supported")
    family, recorded = models.supported()[name], RECORDED[name]["defaults"]
    options = ({} if family.of_transformers else COMMON) | dict(family.options)
    # The original derives them from other options, which its layers prefer.
    for derived in {"hgrn2": ("num_heads",), "rwkv7": ("num_heads", "value_dim")}.get(name, ()):
        del options[derived]
    if name == "mamba":
        assert (options.pop("dt_rank"), recorded["dt_rank"]) == ("auto", 2048 // 16)
    assert {
        key: (value, recorded[key]) for key, value in options.items() if key in recorded and recorded[key] != value
    } == {}
