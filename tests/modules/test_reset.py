"""Weights drawn again, as of a module that was built without memory: as those of a new one."""

import pytest
import torch

import longspan
from longspan.attention import list_mechanisms, mechanism_examples
from longspan.attention.base import REGISTRY
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder


def new(spec):
    if "causal" not in REGISTRY[spec.partition("(")[0]].directions:
        return longspan.build(spec, 8, 2, causal=False)
    return Decoder(DecoderConfig(dim=8, heads=2, depth=2, feedforward=12, vocab=5, attention=spec))


@pytest.mark.parametrize("fields", [{"stack": "act(steps=2, bias=0.5)"}, {"residual": "gru(bias=1.5)"}])
def test_so_are_stacks_and_gates(fields):
    config = DecoderConfig(dim=8, heads=2, depth=2, feedforward=12, vocab=5, **fields)
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    model.reset_parameters()
    whole = Decoder(config).state_dict()
    for name, found in model.state_dict().items():
        assert found.isfinite().all(), name
        assert torch.equal(found, whole[name]) or name.endswith("weight"), name


@pytest.mark.parametrize("spec", [spec for name in list_mechanisms() for spec in mechanism_examples(name)])
def test_a_model_on_the_meta_device_is_drawn_as_a_new_one(spec):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = new(spec)
    whole, buffers = new(spec).state_dict(), dict(new(spec).named_buffers())
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    model.reset_parameters()
    for name, found in model.state_dict().items():
        wanted = whole[name]
        assert found.isfinite().all(), name
        if name in buffers or (wanted.numel() < 16 and len(wanted.unique()) == 1):
            assert torch.equal(found, wanted), name
        elif wanted.numel() >= 16:
            assert 0.4 * wanted.std() - 1e-9 <= found.std() <= 2.5 * wanted.std() + 1e-9, name
