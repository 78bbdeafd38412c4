"""Runs that cannot be: one clear error before anything is written."""

import math
from dataclasses import replace

import pytest

from longspan.models.config import DecoderConfig, EncoderConfig, Seq2SeqConfig
from longspan.train import TrainConfig, fit
from training_process import TINY, tiny

# Fields of a run that no data or model can have -> the message.
FIELDS = [
    ({"steps": 0}, "steps=0 must be at least 1"),
    ({"batch": 0}, "batch=0 must be at least 1"),
    ({"accumulate": 0}, "accumulate=0 must be at least 1"),
    ({"evaluate_every": 0}, "evaluate_every=0 must be at least 1"),
    ({"save_every": 0}, "save_every=0 must be at least 1"),
    ({"keep": 0}, "keep=0 must be at least 1"),
    ({"devices": 0}, "devices=0 must be at least 1"),
    ({"length": -1}, "length=-1 must be at least 0"),
    ({"warmup": -1}, "warmup=-1 must be at least 0"),
    ({"clip": -0.5}, "clip=-0.5 must be at least 0"),
    ({"weight_decay": math.nan}, "weight_decay=nan must be a number, finite"),
    ({"seconds": math.inf}, "seconds=inf must be a number, finite"),
    ({"evaluate_examples": -1}, "evaluate_examples=-1 must be at least 0"),
    ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive"),
    ({"optimizer": "sdg"}, "unknown optimizer 'sdg'; known: adamw, radam"),
    ({"schedule": "cosin"}, r"unknown schedule 'cosin' \(did you mean 'cosine'\?\)"),
    ({"precision": "16"}, "unknown precision '16'.*; known: 32, bf16"),
    ({"schedule": "drop"}, "schedule='drop' requires drop_at"),
    ({"drop_at": 3}, "drop_at=3 requires schedule='drop', not 'cosine'"),
    ({"out": " "}, "out is empty"),
    ({"decay": 3}, "decay=3 requires schedule='wsd', not 'cosine'"),
    ({"schedule": "drop", "drop_at": 2, "final": 0.1}, "final=0.1 requires schedule='cosine' or 'wsd'"),
    ({"final": 1.5}, "final=1.5 must be at most 1"),
    ({"ema": 1.0}, "ema=1.0 must be below 1"),
    ({"ema": -0.1}, "ema=-0.1 must be at least 0"),
    ({"optimizer": "radam", "fused": True}, "fused=True requires optimizer='adamw'"),
    ({"logger": "paper"}, "paper"),
    ({"sequence_parallel": 3}, "sequence_parallel=3 must divide the number of processes, which is 4"),
    ({"sequence_parallel": 0}, "sequence_parallel=0 must be at least 1"),
    ({"sequence_parallel": 2, "stream": True}, "stream=True carries states from batch to batch"),
    ({"sequence_parallel": 2, "intermediate": True}, "intermediate=True has losses of whole rows"),
    ({"sequence_parallel": 2, "targets": 2}, "targets=2 predicts tokens that other processes have"),
    ({"sequence_parallel": 2, "penalty": 0.1}, "penalty=0.1 weighs losses of whole rows"),
    ({"sequence_parallel": 2, "compile": True}, "compile=True compiles blocks"),
    ({"async_checkpoints": True}, "async_checkpoints=True requires strategy='fsdp', not 'auto'"),
    ({"segments": True, "stream": True}, "segments=True has no effect with stream=True"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_fields_of_a_run_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"devices": 4} | fields)


SMALL = {"dim": 8, "depth": 1, "heads": 2, "feedforward": 12}
XL = DecoderConfig(**SMALL, attention="transformer_xl(memory=9)", vocab=256, positions="none")
PAIRED = Seq2SeqConfig(**SMALL, vocab=257, length=8, attention="linear", encoder_attention="softmax")
LABELED = EncoderConfig(**SMALL, attention="linear", vocab=256, outputs=2, labels="a b", pool="mean")
FREE = replace(TINY, positions="none")
STREAM, PAIRS = {"data": "text", "length": 11, "stream": True, "batch": 3}, {"data": "pairs"}
LABELS, PARTS = {"data": "labels:majority"}, {"devices": 2, "sequence_parallel": 2}

# Model, fields of the run, message.
RUNS = [
    (DecoderConfig(), {}, "vocab=256 does not fit digits, whose tokens have 17 levels"),
    (replace(TINY, length=63), {}, "length=63 learned positions are too few for digits: 64 tokens"),
    (TINY, {"segments": True}, "digits contains images"),
    (TINY, {"penalty": 0.01}, "penalty=0.01 weighs .*linear has none"),
    (replace(TINY, attention="linear; softmax", depth=2), {"penalty": 0.01}, "linear, softmax has none"),
    # States that are carried.
    (replace(XL, positions="learned"), STREAM, "positions='learned' has a table of 1024"),
    (replace(XL, attention="linear; softmax", depth=2), STREAM, "the state of softmax keeps every token"),
    (replace(XL, checkpointing=True), STREAM, "checkpointing=True .*stream=True"),
    (replace(XL, vocab=17), STREAM | {"data": "digits", "length": 0}, "digits contains images"),
    (XL, STREAM | {"batch": 999}, r"999 rows \(batch x devices\).* 296 windows"),
    # Pairs.
    (DecoderConfig(vocab=257), PAIRS, "pairs.*model.kind=seq2seq"),
    (PAIRED, {}, "digits requires a decoder, not model.kind="),
    (EncoderConfig(), {}, "digits requires a decoder, not model.kind="),
    (replace(PAIRED, vocab=256), PAIRS, "vocab=256 does not fit pairs:.*, whose tokens have 257 levels"),
    (replace(PAIRED, source_vocab=200), PAIRS, "source_vocab=200 is too small for pairs:.* have 256 levels"),
    (replace(PAIRED, length=4), PAIRS, "length=4 learned positions are too few for pairs:.*: 5 tokens per example"),
    (PAIRED, PAIRS | {"penalty": 0.5}, "penalty=0.5 weighs .*linear, softmax has none"),
    # Labels.
    (DecoderConfig(vocab=256), LABELS, "labels:majority .*model.kind=encoder"),
    (replace(LABELED, pool="none"), LABELS, "pool='none' .*pool='mean'"),
    (replace(LABELED, labels="b a"), LABELS, "outputs=2 and labels='b a' do not fit labels:majority, whose 2 labels"),
    (replace(LABELED, vocab=255), LABELS, "vocab=255 does not fit labels:majority"),
    (replace(LABELED, positions="learned", length=24), LABELS, "length=24 learned positions are too few"),
    (LABELED, LABELS | {"stream": True}, "stream=True requires a decoder"),
    (LABELED, LABELS | {"targets": 2}, "targets=2 requires a decoder"),
    (LABELED, LABELS | PARTS, "sequence_parallel=2 requires a decoder"),
    (LABELED, {}, "digits requires a decoder"),
    # Examples in parts.
    (replace(FREE, attention="sac"), PARTS, "sac.* has no exact form under sequence parallelism: it samples"),
    (replace(FREE, attention="transformer_xl"), PARTS, "transformer_xl.* no gradient enters its memory"),
    (replace(FREE, stack="act(steps=2)"), PARTS, "act.* use another stack"),
    (replace(FREE, stack="reversible"), PARTS, "reversible.* recomputes blocks"),
    (FREE, {"devices": 65, "sequence_parallel": 65}, "65 processes cannot share examples of 64 tokens"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "words.tsv").write_text("".join(f"{i:04d}\t{i % 7:04d}\n" for i in range(300)))
    (folder / "text").mkdir()
    for i, size in enumerate((770, 500, 640, 900, 811)):
        (folder / "text" / f"{i}.txt").write_bytes(bytes(32 + j % 88 for j in range(size)))
    return {"pairs": f"pairs:{folder / 'words.tsv'}", "text": f"text:{folder / 'text'}"}


@pytest.mark.parametrize(("config", "fields", "message"), RUNS)
def test_models_and_data_that_do_not_fit_are_refused(config, fields, message, files, tmp_path):
    name = fields.get("data", "digits")
    with pytest.raises(ValueError, match=message):
        fit(config, tiny(tmp_path, **fields | {"data": files.get(name, name)}), progress=False)
    assert not (tmp_path / "run" / "config.yaml").exists()
