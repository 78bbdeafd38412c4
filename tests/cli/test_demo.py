"""The demo: its files and figures, on a tiny scale; the whole of it under the marker ``demo``."""

import csv
import json
import math
import struct
from dataclasses import replace

import pytest
import torch
import yaml

pytest.importorskip("lightning", reason="the demo trains: pip install longspan[demo]")
pytest.importorskip("matplotlib", reason="the demo draws: pip install longspan[demo]")

from longspan import data, log_likelihood
from longspan.experiments import demo
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.states import nbytes
from longspan.train import TrainConfig, recipes

TINY = replace(demo.PAPER, dim=16, depth=2, heads=2, feedforward=16, length=11)
KINDS = {"linear", "softmax_cached", "softmax_recompute"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, demo.run(out, steps=3, paper=TINY, batch=5)


@pytest.mark.full
def test_files(result):
    out, _ = result
    assert {path.name for path in out.iterdir()} == demo.FILES - {".lock"}
    for name in ("samples_linear.png", "samples_softmax.png", "throughput.png"):
        header = (out / name).read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", header[16:])) >= 100


def test_json(result):
    out, found = result
    assert json.loads((out / "demo.json").read_text()) == json.loads(json.dumps(found))
    assert set(found["bits_per_dim"]) == {"linear", "softmax", "histogram"}
    assert {part: set(kinds) for part, kinds in found["images_per_second"].items()} == dict.fromkeys(
        ("digits", "mnist_784"), KINDS
    )
    assert all(speed > 0 for kinds in found["images_per_second"].values() for speed in kinds.values())
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["mnist_784"]["batch"] == {"linear": 5, "softmax_cached": 5, "softmax_recompute": 1}
    assert "integrated" in found["mnist_784"]["how"]


def test_csv_holds_the_same_figures(result):
    out, found = result
    rows = list(csv.reader((out / "demo.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["figure", "name", "value"]
    assert (
        float(dict((r[1], r[2]) for r in rows if r[0] == "bits_per_dim")["linear"]) == found["bits_per_dim"]["linear"]
    )


def test_state_bytes_grow_for_softmax_only(result):
    _, found = result
    model = Decoder(replace(demo.DIGITS, attention="softmax"))
    assert found["state_bytes"]["digits"]["softmax"] == nbytes(model.init_state(1, 64).layers)
    longer = demo._state_bytes({spec: Decoder(replace(TINY, attention=spec)) for spec in demo.SPECS}, 1000)
    assert longer["linear"] == found["state_bytes"]["mnist_784"]["linear"]
    assert longer["softmax"] > 80 * found["state_bytes"]["mnist_784"]["softmax"]


@pytest.mark.full
def test_a_second_demo_goes_on_from_the_first(result, capsys):
    out, found = result
    again = demo.run(out, steps=3, paper=TINY, batch=5)
    assert again["bits_per_dim"] == found["bits_per_dim"]
    assert "images/s" in capsys.readouterr().out


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
    assert max(bits["linear"], bits["softmax"]) <= bits["histogram"] - 0.3
    for sample in found["samples"].values():
        assert sample["smallest_class"] >= 0.03
        assert sample["distance_ratio"] <= 1.5
    for spec in demo.SPECS:
        same_likelihood(tmp_path, spec)
    speed = found["images_per_second"]["mnist_784"]
    assert speed["linear"] >= 3 * speed["softmax_cached"]
    assert speed["linear"] >= 100 * speed["softmax_recompute"]
    assert found["seconds"] < 360
