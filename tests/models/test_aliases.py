"""Names of other libraries: a message suggests ours, for mechanisms, options, fields, flags and arguments alike."""

import inspect
import re

import pytest
import torch

import longspan
from longspan import Decoder, DecoderConfig, Encoder, EncoderConfig, Seq2Seq, Seq2SeqConfig, Stack, StackConfig
from longspan._utils import aliases
from longspan.attention.base import own_options
from longspan.cli.entry import WRONG, main
from longspan.train.config import TrainConfig

SMALL = {"dim": 8, "depth": 2, "heads": 2, "feedforward": 16}
ARGUMENTS = set("tokens batch beams best stop prompt state mask segments context causal text count n_best data".split())


def test_every_alias_leads_to_a_name_of_ours():
    fields = {*DecoderConfig.__dataclass_fields__, *TrainConfig.__dataclass_fields__}
    options = {
        option for name in longspan.list_mechanisms() for option in own_options(longspan.attention.REGISTRY[name])
    }
    generating = inspect.signature(longspan.generate).parameters
    ours = {*longspan.list_mechanisms(), *fields, *options, *ARGUMENTS, *generating}
    for foreign, meant in aliases.ALIASES.items():
        assert set(meant) <= ours, foreign
        assert foreign == foreign.lower().replace("-", "_")


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        ("mamba2", "unknown name 'mamba2' (did you mean 'ssd'?)"),
        ("flash", "unknown name 'flash' (did you mean 'softmax'?)"),
        ("sliding_window", "unknown name 'sliding_window' (did you mean 'local'?)"),
        ("retnet", "unknown name 'retnet' (did you mean 'retention'?)"),
        ("delta_net", "unknown name 'delta_net' (did you mean 'deltanet'?)"),
        ("gated_linear_attention", "unknown name 'gated_linear_attention' (did you mean 'gla'?)"),
        ("softmax(n_kv_heads=2)", "softmax has no option 'n_kv_heads' (did you mean 'kv_heads'?)"),
        ("gla; softmax", "Decoder(DecoderConfig(attention='gla; softmax'))"),
    ],
)
def test_a_foreign_mechanism(foreign, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        longspan.build(foreign, 8, 2)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        *((name, "depth") for name in ("n_layers", "num_layers", "layers")),
        *((name, "heads") for name in ("nhead", "n_heads", "num_heads")),
        *((name, "dim") for name in ("d_model", "hidden_size")),
        ("ffn", "feedforward"),
    ],
)
def test_a_foreign_field(foreign, ours, capsys):
    with pytest.raises(TypeError, match=rf"Config\(\) has no argument {foreign!r} \(did you mean {ours!r}\?\)"):
        DecoderConfig(**{foreign: 3})
    with pytest.raises(ValueError, match=rf"unknown field of DecoderConfig {foreign!r} \(did you mean {ours!r}\?\)"):
        DecoderConfig.from_dict({foreign: 3})
    assert main(["train", f"--model.{foreign}", "3"]) == WRONG
    assert f"(did you mean '--model.{ours}'?)" in capsys.readouterr().err


def test_a_flag_without_its_group_is_one_short_line(capsys):
    assert main(["train", "--data", "text:book.txt"]) == WRONG
    message = capsys.readouterr().err
    assert (
        message == "longspan: error: unknown option '--data' (did you mean '--run.data'?); see longspan train --help\n"
    )


def calls():
    model = Decoder(DecoderConfig(**SMALL, vocab=5)).eval()
    ids, x = torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, 8)
    attention = longspan.build("linear", 8, 2)
    pairs = Seq2Seq(Seq2SeqConfig(**SMALL, vocab=5)).eval()
    hide = {"key_padding_mask": ids.bool()}
    return {
        "build": (lambda: longspan.build("gla", embed_dim=8, heads=2), "did you mean 'dim'"),
        "generate": (lambda: longspan.generate(model, ids, new_tokens=3), "did you mean 'max_new_tokens'"),
        "beam_search": (
            lambda: longspan.beam_search(model, ids, max_new_tokens=3, num_beams=3),
            "did you mean 'beams'",
        ),
        "attention": (lambda: attention(x, **hide), "pass mask=~key_padding_mask"),
        "decoder": (lambda: model(ids, **hide), "pass mask=~key_padding_mask"),
        "seq2seq": (lambda: pairs(ids, ids, **hide), "pass mask=~key_padding_mask"),
        "encoder": (lambda: Encoder(EncoderConfig(**SMALL))(x, **hide), "pass mask=~key_padding_mask"),
        "stack": (lambda: Stack(StackConfig(**SMALL))(x, **hide), "pass mask=~key_padding_mask"),
        "hub": (lambda: model(ids, attention_mask=ids), "pass mask=attention_mask.bool()"),
    }


@pytest.mark.parametrize("name", list(calls()))
def test_a_foreign_argument_of_a_call(name):
    call, hint = calls()[name]
    with pytest.raises(TypeError, match="has no argument") as caught:
        call()
    assert hint in str(caught.value)
