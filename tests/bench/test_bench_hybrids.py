"""Whole models of transformers, measured: both ways in turn, checked first, and nothing left replaced."""

import dataclasses

import pytest

from longspan.compat import transformers as on_cpu
from longspan_lab.bench import hybrid_weights, hybrids

pytest.importorskip("transformers")


@pytest.fixture
def options(monkeypatch):
    monkeypatch.setattr(hybrids, "DECODED", 1)
    monkeypatch.setattr(hybrids, "memory", lambda name, dtype, way, length, options: 3.0 if way == "longspan" else 6.0)
    return hybrids.Options(models=("mamba2",), length=16, dtypes=("float32",), rounds=1, small=True)


def watch(items, count, label):
    return items


def test_both_ways_are_measured_in_all_that_a_model_does(options):
    *_, result = hybrids.run(options, watch)
    rows = {(row["mode"], row["candidate"]): row for row in result["rows"]}
    assert set(rows) == {(mode, way) for mode in hybrids.MODES for way in hybrids.WAYS}
    assert all(row["error"] < hybrids.ALLOWED and row["seconds"] > 0 for row in rows.values())
    assert rows["training step", "longspan"]["mb"] == 3.0
    assert not result["refused"]
    (table, shares) = hybrids.text(result)
    assert [row[2] for row in table[1:]] == list(hybrids.MODES)
    assert table[2][-2:] == ["6 / 3", "0.50"]
    assert "gatedBackward" in shares[1][1]
    assert on_cpu.status().functions == {}


def test_a_step_too_long_for_the_original_code_is_measured_alone(options, monkeypatch):
    monkeypatch.setitem(hybrids.TRAINED, "mamba2", 8)
    *_, result = hybrids.run(options, watch)
    whole = "training step of 16 tokens"
    assert [(r["mode"], r["candidate"]) for r in result["rows"] if r["mode"].startswith("training")] == [
        *(("training step", way) for way in hybrids.WAYS),
        (whole, "longspan"),
    ]
    (table, _) = hybrids.text(result)
    (row,) = (row for row in table if row[2] == whole)
    assert row[3] == row[5] == "-"
    assert row[-2:] == ["- / 3", ""]


@pytest.mark.parametrize("name", ["mamba2", "qwen3next"])
def test_weights_of_few_bits_are_measured_in_the_engine(name, options, monkeypatch):
    monkeypatch.setattr(hybrid_weights, "memory", lambda path: (2.0, 1.0, 0.5))
    *_, result = hybrids.run(dataclasses.replace(options, models=(name,), weights=("int8", "int4")), watch)
    assert not result["refused"]
    ours = [("float32", "longspan float32")]
    ours += [(kind, f"longspan {of}") for kind in ("int8", "int4") for of in ("int16", "int8")]
    for batch in (1, 64):
        found = {(r["weights"], r["candidate"]) for r in result["rows"] if r.get("batch") == batch}
        assert found - {("int8", "llama.cpp"), ("int4", "llama.cpp")} == set(ours)
    (table,) = hybrids.text(result)
    assert {row[1] for row in table[1:]} == {"float32", "int8", "int4"}
    assert on_cpu.status().functions == {}


def test_a_model_that_does_not_agree_gets_no_figure(options, monkeypatch):
    monkeypatch.setattr(hybrids, "ALLOWED", 0.0)
    *_, result = hybrids.run(options, watch)
    assert result["rows"] == []
    assert result["refused"][0]["candidate"] == "mamba2, float32"
    assert "its outputs are off by" in result["refused"][0]["reason"]


@pytest.mark.parametrize("name", hybrids.MODELS)
def test_models_have_the_sizes_that_are_published(name):
    """As far as one layer goes; nothing is computed."""
    import torch

    with torch.device("meta"):
        made = hybrids.model(name, "float32", False)
    assert made.config.hidden_size == hybrids.MODELS[name][3]["hidden_size"]
    assert made.config.num_hidden_layers == hybrids.MODELS[name][3]["num_hidden_layers"]


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="unknown model 'mamba3'"):
        next(hybrids.run(hybrids.Options(models=("mamba3",)), watch))
    with pytest.raises(ValueError, match="unknown dtype 'float16'"):
        next(hybrids.run(hybrids.Options(dtypes=("float16",)), watch))
