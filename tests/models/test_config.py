"""Configs: plain fields, checked once, back and forth to dictionaries."""

import pytest

from longspan.models.config import DecoderConfig, EncoderConfig, StackConfig


@pytest.mark.parametrize("config", [StackConfig(dim=16, heads=2), DecoderConfig(vocab=11), EncoderConfig(outputs=3)])
def test_round_trip(config):
    assert type(config).from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (StackConfig, {"dim": 66, "heads": 4}, "dim=66 is not a multiple of heads=4"),
        (StackConfig, {"depth": 0}, "depth=0 must be at least 1"),
        (StackConfig, {"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
        (StackConfig, {"activation": "gleu"}, r"unknown activation 'gleu' \(did you mean 'gelu'\?\)"),
        (StackConfig, {"norm": "batch"}, "unknown norm 'batch'; known: layer, rms"),
        (StackConfig, {"norm": "rms(eps=0.0)"}, "eps=0.0 of a norm must be positive"),
        (StackConfig, {"attention": "linear;"}, "empty spec in 'linear;'"),
        (DecoderConfig, {"vocab": 1}, "vocab=1 must be at least 2"),
        (DecoderConfig, {"length": 0}, "length=0 must be at least 1"),
        (
            DecoderConfig,
            {"positions": "relativ"},
            r"unknown positions 'relativ' \(did you mean 'relative'\?\); known: alibi, learned, none,",
        ),
        (
            DecoderConfig,
            {"tied": True, "likelihood": "logistics(mixtures=3)"},
            "tied=True needs likelihood='categorical'",
        ),
        (EncoderConfig, {"vocab": -1}, "vocab=-1 must not be negative"),
        (EncoderConfig, {"outputs": -1}, "outputs=-1 must not be negative"),
        (
            EncoderConfig,
            {"embedding_norm": True, "stack": "act(steps=2)"},
            "embedding_norm=True and prenorm=True take the norm from the first block",
        ),
        (EncoderConfig, {"pool": "max"}, "unknown pool 'max'; known: first, mean, none"),
        (EncoderConfig, {"outputs": 2, "labels": "a b c"}, "labels='a b c' .* 3 names, .* outputs=2"),
        (EncoderConfig, {"outputs": 2, "labels": "a a"}, "labels='a a'"),
        (DecoderConfig, {"positions": None}, "positions=None must be a string"),
        (DecoderConfig, {"attention": 5}, "attention=5 must be a string"),
        (DecoderConfig, {"norm": []}, r"norm=\[\] must be a string"),
        (DecoderConfig, {"dim": True, "heads": 1}, "dim=True must be a whole number"),
        (DecoderConfig, {"prenorm": 1}, "prenorm=1 must be True or False"),
        (DecoderConfig, {"dropout": float("nan")}, "dropout=nan must be a number, finite"),
        (DecoderConfig, {"depth": 10**9}, "depth=1000000000 must be at most 10000"),
        (
            DecoderConfig,
            {"length": 1 << 63},
            "length=9223372036854775808 must be a whole number, finite and within the range",
        ),
    ],
)
def test_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_unknown_fields_are_named():
    with pytest.raises(
        ValueError, match=r"unknown field of DecoderConfig 'dims' \(did you mean 'dim'\?\); known: activation"
    ):
        DecoderConfig.from_dict({"dims": 3})


def test_a_config_is_made_from_a_dict():
    with pytest.raises(ValueError, match=r"Config.from_dict .* not \[3\]"):
        DecoderConfig.from_dict([3])
    with pytest.raises(ValueError, match="unknown field of DecoderConfig 3; known: activation"):
        DecoderConfig.from_dict({3: 3})
