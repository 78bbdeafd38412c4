"""Parameter groups: what weight decay shrinks, over every mechanism of the registry."""

import pytest
import torch
from torch import nn

import longspan
from longspan.attention import list_mechanisms, mechanism_examples
from longspan.attention.base import REGISTRY
from longspan.models.config import DecoderConfig, EncoderConfig, Seq2SeqConfig
from longspan.models.decoder import Decoder
from longspan.models.encoder import Encoder
from longspan.models.seq2seq import Seq2Seq
from longspan.train import TrainConfig, loop, parameter_groups

SIZES = {"dim": 8, "heads": 2, "feedforward": 12, "depth": 1}
# Parameters of two dimensions or more that are neither matrices nor filters, by mechanism.
SPARED = {
    "bp": {"edges"},
    "compressive": {"u", "v"},
    "etc": {"tokens", "labels"},
    "hedgehog": {"key_map", "query_map"},
    "kda": {"a_log", "dt_bias"},
    "log_linear": {"level_scale"},
    "luna": {"memory"},
    "mamba": {"a_log"},
    "mamba3": {"key_bias", "query_bias"},
    "memory_compressed": {"null_key", "null_value"},
    "relative": {"u", "v"},
    "rfa": {"sigma"},
    "rwkv7": {"bonus", "mixes"},
    "synthesizer": {"offsets.0"},
    "transformer_xl": {"u", "v"},
}


def built(spec):
    return longspan.build(spec, 8, 2, causal="causal" in REGISTRY[spec.split("(")[0]].directions)


def split(model):
    """Names of the parameters that are decayed, and of those that are not; each of them once."""
    decayed, spared = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in (decayed, spared)]
    assert sorted([*groups[0], *groups[1]]) == sorted(names.values())
    return [set(group) for group in groups]


@pytest.mark.parametrize("name", list_mechanisms())
def test_every_parameter_of_a_mechanism_is_in_one_group(name):
    seen = set()
    for spec in mechanism_examples(name):
        module = built(spec)
        decayed, spared = split(module)
        assert {parameter for parameter in decayed if module.get_parameter(parameter).ndim < 2} == set()
        tables = {n for n, part in module.named_modules() if isinstance(part, nn.Embedding)}
        assert not {parameter for parameter in decayed if parameter.rpartition(".")[0] in tables}
        seen |= {p for p in spared if module.get_parameter(p).ndim >= 2 and p.rpartition(".")[0] not in tables}
    assert seen == SPARED.get(name, set())


def test_what_a_mechanism_spares_is_there():
    for name, cls in REGISTRY.items():
        for part in cls.no_decay:
            assert any(hasattr(built(spec), part) for spec in mechanism_examples(name)), (name, part)


@pytest.mark.parametrize(
    "model",
    [
        Decoder(
            DecoderConfig(**SIZES, attention="gated_deltanet", tied=True, norm="rms", residual="highway", vocab=11)
        ),
        Encoder(EncoderConfig(**SIZES, attention="softmax", positions="learned", vocab=11, outputs=3, pool="mean")),
        Seq2Seq(Seq2SeqConfig(**SIZES, attention="ssd", encoder_attention="linear", vocab=11)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_decay_their_matrices_alone(model):
    decayed, spared = split(model)
    assert {name for name in spared if "embedding" in name} == {n for n in decayed | spared if "embedding" in n}
    assert {name for name in decayed | spared if name.endswith(("query.weight", "expand.weight"))} <= decayed
    assert not {name for name in decayed if name.endswith(("bias", "a_log", "norm1.weight", "norm2.weight"))}


def test_frozen_parameters_are_in_no_group():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).requires_grad_(False)
    model[1].requires_grad_(True)
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1, 1]


def test_training_uses_them():
    model = Decoder(DecoderConfig(**SIZES, attention="kda", vocab=17, length=64))
    run = TrainConfig(weight_decay=0.25)
    optimizer = loop.Task(model, run, nn.Module()).configure_optimizers()
    ours = parameter_groups(model, 0.25)
    for group, expected in zip(optimizer.param_groups, ours, strict=True):
        assert group["weight_decay"] == expected["weight_decay"]
        assert list(map(id, group["params"])) == list(map(id, expected["params"]))
    # With no gradient at all a step is the decay alone.
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == split(model)[0]
