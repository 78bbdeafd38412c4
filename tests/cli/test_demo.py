"""The demo: its files and figures, on a tiny scale; the whole of it under the marker ``demo``."""

import csv
import html
import json
import math
import re
import struct
from dataclasses import replace

import pytest
import torch
import yaml

pytest.importorskip("lightning", reason="the demo trains: pip install ./lab")
pytest.importorskip("matplotlib", reason="the demo draws: pip install ./lab")

from longspan import data, log_likelihood
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.states import nbytes
from longspan.train import TrainConfig, recipes
from longspan_lab.experiments import demo

TINY = demo.Scale(lengths=(16, 48), dim=16, heads=2, batch=5, drawn=3, tops=2, ways=2, tokens=32, rounds=1)
KINDS = {"linear", "softmax_cached", "softmax_recompute"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, demo.run(out, steps=3, scale=TINY)


@pytest.mark.full
def test_files(result):
    out, _ = result
    assert {path.name for path in out.iterdir()} == demo.FILES - {".lock"}
    for name in demo.PICTURES:
        header = (out / name).read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", header[16:])) >= 50


def test_json(result):
    out, found = result
    assert json.loads((out / "demo.json").read_text()) == json.loads(json.dumps(found))
    assert set(found["bits_per_dim"]) == {"linear", "softmax", "histogram"}
    assert set(found["images_per_second"]) == KINDS
    assert all(speed > 0 for speed in found["images_per_second"].values())
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["parameters"]["linear"] == found["parameters"]["softmax"]


def test_csv_holds_the_same_figures(result):
    out, found = result
    rows = list(csv.reader((out / "demo.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["figure", "name", "value"]
    held = {(figure, name): value for figure, name, value in rows[1:]}
    assert float(held["bits_per_dim", "linear"]) == found["bits_per_dim"]["linear"]
    for row in found["lengths"]["rows"]:
        assert float(held["lengths_seconds", f"{row['candidate']}.{row['length']}"]) == row["seconds"]


def test_state_bytes_grow_for_softmax_only(result):
    _, found = result
    for spec in demo.SPECS:
        model = Decoder(replace(demo.DIGITS, attention=spec))
        assert found["state_bytes"][spec] == nbytes(model.init_state(1, 64).layers)
    rows = {(row["candidate"], row["length"]): row["state_bytes"] for row in found["lengths"]["rows"]}
    assert {spec for spec, _ in rows} == set(demo.COMPARED)
    assert rows["linear", 48] == rows["linear", 16]
    assert rows["softmax", 48] > 2 * rows["softmax", 16]


def test_a_length_that_takes_too_long_is_left_out_for_softmax():
    rows = demo._lengths(replace(TINY, limit=1e-9))["rows"]
    left_out = [(row["candidate"], row["length"]) for row in rows if "seconds" not in row]
    assert left_out == [("softmax", 48)]


def test_the_page_stands_alone(result):
    """Pictures are embedded, nothing is loaded from elsewhere, and the machine is named."""
    out, found = result
    text = (out / "index.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|srcset|href)="(.*?)"', text)
    # All pictures except those of models that are not trained enough.
    assert len(sources) == len(demo.PICTURES) - len(demo.SPECS)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert html.escape(found["machine"]["processor"]) in text


def test_the_layer_of_transformers(result):
    layer = result[1]["layer"]
    if "skipped" in layer:
        pytest.skip(layer["skipped"])
    assert layer["relative_difference"] < 1e-4
    assert all(seconds > 0 for mode in ("prefill", "training step") for seconds in layer[mode].values())


@pytest.mark.parametrize("transformers", ["missing", "foreign"])
def test_without_a_fitting_transformers_the_layer_is_skipped(transformers, monkeypatch):
    if transformers == "missing":
        monkeypatch.setattr(demo, "find_spec", lambda name: None)
    else:
        pytest.importorskip("transformers", reason="a version that does not fit")
        monkeypatch.setattr(demo, "LAYERS", ())
    assert set(demo._layer(TINY)) == {"skipped"}


@pytest.mark.full
def test_a_second_demo_continues_the_first_and_prints_its_page_last(result, capsys):
    out, found = result
    again = demo.run(out, steps=3, scale=TINY)
    assert again["bits_per_dim"] == found["bits_per_dim"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(out / "index.html")
    assert max(map(len, lines[:-1])) <= 80


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds 'thesis.tex', which is not the demo's; choose another folder"):
        demo.run(tmp_path)


def test_histogram_by_hand():
    """One pixel, two levels, train 0 0 1, test 0: add-one counts 3 and 2 of 5, so -log2(3/5) bits."""
    dataset = replace(
        data.load("digits"),
        vocab=2,
        length=1,
        grid=(1, 1),
        splits={"train": torch.tensor([[0], [0], [1]]).byte(), "test": torch.zeros(1, 1).byte()},
    )
    assert demo.histogram_bits(dataset) == pytest.approx(-math.log2(3 / 5))


def test_held_out_images_look_like_the_data_and_noise_does_not():
    dataset = data.load("digits")
    true = demo.likeness(dataset.splits["test"], dataset)
    assert true["distance_ratio"] == pytest.approx(1)
    assert true["smallest_class"] > 0.05
    noise = torch.randint(0, 17, (256, 64), generator=torch.Generator().manual_seed(0))
    assert demo.likeness(noise, dataset)["distance_ratio"] > 1.5


def test_the_recipe_is_the_demos_training():
    recipe = yaml.safe_load(recipes.find("digits").read_text(encoding="utf-8"))
    assert DecoderConfig(**recipe["model"]) == demo.DIGITS
    assert TrainConfig(**recipe["run"]) == replace(demo.TRAINING, out=recipe["run"]["out"])


def same_likelihood(folder, spec, tolerance=1e-4):
    """100 held-out digits read in one pass and by stepping: nats per image, summed in float64."""
    dataset = data.load("digits")
    images = dataset.take("test", torch.arange(100))
    model = checkpoint.load(folder / spec)
    whole, stepped = log_likelihood(model, images), log_likelihood(model, images, chunk=1)
    assert 50 < -whole.mean() < 64 * math.log(17)
    assert (whole - stepped).abs().max().item() <= tolerance


@pytest.mark.parametrize("spec", demo.SPECS)
def test_a_trained_model_scores_the_same_as_an_rnn(result, spec):
    same_likelihood(result[0], spec)


@pytest.mark.demo
def test_the_whole_demo(tmp_path):
    """What the demo must show: it learns, the samples look like digits, and linear is faster by what it should be."""
    found = demo.run(tmp_path)
    bits = found["bits_per_dim"]
    assert abs(bits["linear"] - bits["softmax"]) <= 0.1
    assert max(bits["linear"], bits["softmax"]) <= bits["histogram"] - 0.2
    for sample in found["samples"].values():
        assert sample["smallest_class"] >= 0.02
        assert sample["distance_ratio"] <= 1.6
    for spec in demo.SPECS:
        same_likelihood(tmp_path, spec)
    seconds = {(row["candidate"], row["length"]): row.get("seconds") for row in found["lengths"]["rows"]}
    longest = max(length for (_, length), taken in seconds.items() if taken)
    assert seconds["softmax", longest] is None or seconds["linear", longest] < seconds["softmax", longest] / 4
    if "skipped" not in found["layer"]:
        assert found["layer"]["prefill"]["longspan"] < found["layer"]["prefill"]["transformers"]
    assert found["processor_seconds"] < 400
