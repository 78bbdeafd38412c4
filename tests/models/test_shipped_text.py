"""The text model inside the package: it has learned English, continues a prompt, and has a record."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from data_files import shared
from longspan import data
from longspan.cli.entry import WRONG, main
from longspan.generation.sampling import log_likelihood
from longspan.models import checkpoint, pretrained
from longspan.models.config import DecoderConfig
from longspan.train import TrainConfig, fit
from longspan_lab.tools import shipped

ROOT = Path(__file__).parents[2]


# A text that every machine has, in other words than those that the model has read.
BYTES = torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()[:2560]), dtype=torch.uint8).long().view(10, 256)


def test_one_parallel_pass_is_stepping_on_a_text():
    model = pretrained.load("text")
    whole = log_likelihood(model, BYTES)
    assert (whole - log_likelihood(model, BYTES, chunk=1)).abs().max() < 1e-3 * whole.abs().max()
    assert pretrained.record("text")["stepping"]["largest_difference"] < 0.05


def test_the_text_model_has_learned_english_as_its_record_states():
    record, model = pretrained.record("text"), pretrained.load("text")
    assert record["bits_per_byte"]["test"] < 2.6
    assert "War and Peace" in record["about"]
    # English that it has not read is likelier to it than to a model that knows how frequent each of these bytes is.
    prose = torch.frombuffer(bytearray(PROSE), dtype=torch.uint8).long()[None]
    shares = torch.bincount(prose[0], minlength=256) / prose.numel()
    frequent = -(shares[shares > 0] * shares[shares > 0].log2()).sum()
    assert -log_likelihood(model, prose).item() / prose.numel() / math.log(2) < 0.75 * frequent
    for text, prompt in zip(record["samples"]["texts"], PROMPTS, strict=True):
        assert text.startswith(prompt)
        words = re.findall("[a-z]+", text[len(prompt) :].lower())
        assert len(words) > 40
        # Of any English text these are about a fifth.
        assert sum(word in FREQUENT for word in words) > 0.1 * len(words)


PROSE = (
    b"The old man stood at the window for a long time and looked at the road. There was nobody on it, and the rain had "
    b"begun to fall again. When his daughter came into the room he did not turn to her, and she said nothing, but sat "
    b"down at the table and took the letter that had come in the morning. They both knew what was in it."
)
PROMPTS = ("The prince ", '"My dear," said ', "On the morning of the battle ")
FREQUENT = set("the and of to a in he that was his with it her not him she had".split())


def test_the_record_holds_the_bits_that_this_text_has():
    record = pretrained.record("text")
    text = data.load(
        f"text:{shared('text') / 'warpeace.txt.gz'}", checkpoint.read_config(pretrained.path("text"))["run"]["length"]
    )
    assert record["data"] == {"text": text.checksum}
    found = -log_likelihood(pretrained.load("text"), text.take("test", torch.arange(60) * (text.count("test") // 60)))
    found = found / text.length / math.log(2)
    # 60 of 624 windows: four standard errors.
    assert abs(found.mean() - record["bits_per_byte"]["test"]) < 4 * found.std() / 60**0.5


def test_text_continues_a_prompt(capsys):
    words = ["generate", "text", "--prompt", "The prince ", "--tokens", "60", "--seed", "3"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("The prince ")
    assert first.endswith("\n")
    assert len(first.encode()) >= 11 + 60
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert main([*words[:-1], "4"]) == 0
    assert capsys.readouterr().out != first


def test_a_text_model_is_measured_on_a_text_that_is_named(capsys, tmp_path):
    assert main(["eval", "text"]) == WRONG
    assert "--data text:FILE\n" in capsys.readouterr().err
    file = tmp_path / "licence.txt"
    file.write_bytes(bytes(BYTES.flatten().tolist()) * 3)
    assert main(["eval", "text", "--data", f"text:{file}", "--length", "128", "--json"]) == 0
    found, tokens = json.loads(capsys.readouterr().out), data.load(f"text:{file}", 128).take("test", torch.arange(3))
    assert found["bits"] == pytest.approx(
        -log_likelihood(pretrained.load("text"), tokens).mean().item() / 128 / math.log(2)
    )


def test_a_page_has_the_figures_of_the_record():
    record = pretrained.record("text")
    figures = (f"{record['bits_per_byte']['test']:.2f}", f"{record['state_bytes']:,}")
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "how-to").glob("*.md")]
    assert any(all(figure in page for figure in figures) for page in pages)
    batches = TrainConfig(**checkpoint.read_config(pretrained.path("text"))["run"])
    # Less than the nine tenths of the book that are for training.
    assert record["steps"] * batches.batch * batches.length < 0.9 * 3_196_228


def test_a_run_on_a_text_becomes_a_model(tmp_path, monkeypatch):
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(BYTES.flatten().tolist()))
    source = f"text:{file}"
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "package")
    for name, value in {"STEPPED": 3, "BYTES": 20}.items():
        monkeypatch.setattr(shipped, name, value)
    config = DecoderConfig(dim=6, depth=1, heads=2, feedforward=7, vocab=256, attention="linear", positions="none")
    run = TrainConfig(
        data=source, length=32, steps=2, batch=2, evaluate_every=2, save_every=2, out=str(tmp_path / "run")
    )
    fit(config, run, progress=False)
    with pytest.raises(ValueError, match="--about"):
        shipped.ship(tmp_path / "run", source)
    assert not pretrained.FOLDER.exists()
    record = shipped.ship(tmp_path / "run", source, about="a licence")
    assert record == pretrained.record("text")
    assert record["about"] == "a licence"
    assert record["command"].startswith("longspan train --config text --run.data text:FILE --model.dim 6 ")
    assert "batch 2" in record["command"]
    assert str(tmp_path) not in (pretrained.path("text") / checkpoint.CONFIG).read_text() + json.dumps(record)
    assert not {"images_per_second", "bits_per_dim"} & set(record)
    dataset, loaded = data.load(source, 32), pretrained.load("text")
    bits = -log_likelihood(loaded, dataset.take("test", torch.arange(4))).mean().item() / 32 / math.log(2)
    assert record["bits_per_byte"]["test"] == pytest.approx(bits, abs=1e-5)
    assert record["data"] == {"text": dataset.checksum}
    assert record["state_bytes"] == sum(t.nbytes for t in loaded.init_state(1).layers[0])
    assert set(record["bytes_per_second"]) == {"1", "64"}
    assert record["stepping"]["largest_difference"] < 1e-3
    texts = record["samples"]["texts"]
    assert [shipped.continued(loaded, prompt) for prompt in PROMPTS] == texts
    assert [text[: len(prompt)] for text, prompt in zip(texts, PROMPTS, strict=True)] == list(PROMPTS)
