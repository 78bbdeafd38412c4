"""Images drawn pixel by pixel: what the experiment trains, saves, times and shows."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from longspan import build, data
from longspan.cli.entry import main
from longspan.generation.sampling import log_likelihood
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import objectives
from longspan_lab.bench import case, throughput
from longspan_lab.experiments import images, images_report, images_speed, learning, paper
from longspan_lab.experiments.experiment import Place
from longspan_lab.tools import reproduction
from support.experiments import unwatched

SMALL = replace(images.EXPERIMENT.quick, steps=6, evaluate_every=2, schedule="constant", samples=7, top=0.3)
LINEAR, SOFTMAX = ({"what": "training", "attention": name} for name in ("linear", "softmax"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where both trainings have been."""
    return Place(tmp_path_factory.mktemp("images") / "images-work", unwatched)


@pytest.fixture(scope="module")
def trainings(place):
    return [images.measure(SMALL, point, place) for point in (LINEAR, SOFTMAX)]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return {name: Decoder(SMALL.config(name, 17, 64)).eval() for name in SMALL.names()}


def test_scales_are_those_of_the_publication_where_they_say_so():
    one = images.EXPERIMENT
    published, laptop = one.scales["paper"], one.scales["laptop"]
    config = published.config("linear")
    assert (config.depth, config.dim, config.heads, config.feedforward) == (8, 256, 8, 1024)
    assert (config.likelihood, config.length) == ("logistics(mixtures=10)", 784)
    run = published.run(Path("x"))
    assert (run.optimizer, run.learning_rate, run.schedule, run.batch) == ("radam", 1e-4, "constant", 10)
    assert run.steps * run.batch == 250 * 55_000
    with torch.device("meta"):
        size = sum(p.numel() for p in Decoder(laptop.config("linear")).parameters())
    assert 0.8e6 < size < 1.2e6
    kinds = [point["what"] for point in images.points(laptop)]
    assert kinds == ["training"] * 4 + ["images"] * 2 + ["token"] * 10
    # The publication's four methods; at its own scale Reformer has 64 buckets, and 27 chunks of 29 for 783 pixels.
    for scale in one.scales.values():
        assert [paper.called(name) for name in scale.names()] == ["linear", "softmax", "lsh-1", "lsh-4"]
    for name in published.names()[2:]:
        reformer = build(name, 256, 8)
        assert (reformer.buckets, reformer.chunk, -(-783 // reformer.chunk)) == (64, 29, 27)


# Trainings


def test_a_training_reports_its_curve_and_the_bits_of_its_best_checkpoint(trainings, place):
    dataset = data.load("digits")
    for row, name in zip(trainings, SMALL.names(), strict=True):
        folder = place.folder / name
        model = checkpoint.load(folder)
        assert model.config == SMALL.config(name, 17, 64)
        assert row["parameters"] == sum(p.numel() for p in model.parameters())
        assert [step for step, _, _ in row["curve"]] == [2, 4, 6]
        seconds = [seconds for _, seconds, _ in row["curve"]]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        assert row["validation"] == min(bits for _, _, bits in row["curve"])
        # SMALL.tests images, evenly spaced.
        tokens = dataset.take("test", torch.tensor([0, 58, 117]))
        bits = -log_likelihood(model, tokens).mean().item() / 64 / math.log(2)
        assert row["test"] == pytest.approx(bits, abs=1e-5)


def test_an_interrupted_training_goes_on_to_the_same_figures(trainings, tmp_path, monkeypatch):
    place, evaluate, calls = Place(tmp_path / "images-work", unwatched), objectives.total, []

    def interrupting(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments, **options)

    monkeypatch.setattr(objectives, "total", interrupting)
    with pytest.raises(KeyboardInterrupt):
        images.measure(SMALL, LINEAR, place)
    assert checkpoint.read_config(checkpoint.resolve(place.folder / "linear", prefer="last"))["step"] < SMALL.steps
    row, (whole, _) = images.measure(SMALL, LINEAR, place), trainings
    assert [(step, bits) for step, _, bits in row["curve"]] == [(step, bits) for step, _, bits in whole["curve"]]
    assert (row["test"], row["validation"]) == (whole["test"], whole["validation"])


def test_seconds_of_all_processes_are_summed(tmp_path):
    lines = [
        "step,loss,validation_bits,seconds",
        "10,1,,5.0",
        "20,1,2.5,11.0",
        "30,1,2.25,3.0",
        "40,1,,4",
        "50,1,2.0,9.5",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    assert learning.curve(tmp_path) == [[20, 11.0, 2.5], [30, 14.0, 2.25], [50, 20.5, 2.0]]


def canvas(path: Path) -> np.ndarray:
    """Every picture of a grid of 8x8 pixels, each enlarged eight times with gaps of four: (rows, columns, 8, 8)."""
    with Image.open(path) as image:
        array = np.asarray(image)
    high, wide = (size // 68 for size in array.shape)
    cells = [
        [array[4 + 68 * i : 68 + 68 * i : 8, 4 + 68 * j : 68 + 68 * j : 8] for j in range(wide)] for i in range(high)
    ]
    return np.array(cells)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_completions_keep_what_was_given(name, trainings, place):
    samples = canvas(place.folder.parent / f"images-samples-{name}.png")
    assert samples.shape == (3, 3, 8, 8)
    cells = canvas(place.folder.parent / f"images-completions-{name}.png")[0]
    digits = data.load("digits")
    originals = digits.picture(digits.take("test", torch.tensor([0, 58, 117]))).numpy()
    # 0.3 of eight rows are two.
    for given, completed, shown, original in zip(cells[::3], cells[1::3], cells[2::3], originals, strict=True):
        np.testing.assert_array_equal(shown, original)
        np.testing.assert_array_equal(completed[:2], original[:2])
        np.testing.assert_array_equal(given[:2], original[:2])
        assert len(np.unique(given[2:])) == 1
        assert (completed[2:] != original[2:]).any()


def test_speed_is_that_of_the_trained_models_and_without_them_there_is_none(trainings, place, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(images_speed, "images", lambda models, *_: asked.update(models) or {})
    images.measure(SMALL, {"what": "images", "batch": 2}, place)
    for name, model in asked.items():
        best = checkpoint.load(place.folder / name).state_dict()
        assert all(torch.equal(tensor, best[key]) for key, tensor in model.state_dict().items())
    assert list(asked) == ["linear", "softmax"]
    with pytest.raises(ValueError, match="no checkpoint at .*; delete the experiment's JSON, too, so that"):
        images.measure(SMALL, {"what": "images", "batch": 2}, Place(tmp_path / "none", unwatched))


# Speed


@pytest.fixture
def clock(monkeypatch):
    """Figures as a clock in our hands would give them: seconds by candidate; every sampler runs once."""
    taken = {}

    def take(samplers, rounds, label, watch, *, warm=True):
        for sampler in samplers.values():
            assert sampler(1) > 0
        taken.update(rounds=rounds, names=list(samplers))
        return {name: case.Figure(taken["seconds"](name), 0, rounds, 1, 1, 2) for name in samplers}, {}

    monkeypatch.setattr(case, "take", take)
    return taken


def test_whole_images_by_a_state_and_recomputing_integrated(models, clock):
    # A step at position p takes p + 1 ms: 64 of them 64 * 65 / 2.
    clock["seconds"] = lambda name: (
        (int(name.split()[1]) + 1) / 1000 if " " in name else {"linear": 2, "softmax": 3}[name]
    )
    found = images_speed.images(models, 64, 6, 5, unwatched)
    recomputed = "softmax, prefix recomputed"
    assert clock["rounds"] == 5
    # What does not grow is not recomputed.
    assert list(found["seconds"]) == ["linear", "softmax", recomputed]
    assert found["seconds"][recomputed] == pytest.approx(2.080)
    assert found["images"] == {"linear": 6, "softmax": 6, recomputed: 4}
    assert found["images_per_second"] == pytest.approx({"linear": 3, "softmax": 2, recomputed: 4 / 2.080})
    # One of each kind from every candidate: two whole ones, five positions.
    assert (found["rejected"], found["disturbed"]) == (7, 14)


def test_recomputing_reads_the_prefix_of_few_images_at_most(models, clock, monkeypatch):
    asked = []
    real = throughput.recomputer
    monkeypatch.setattr(
        throughput, "recomputer", lambda model, *rest: asked.append((model, *rest)) or real(model, *rest)
    )
    clock["seconds"] = lambda name: 1.0
    images_speed.images(models, 64, 3, 1, unwatched)
    assert asked == [(models["softmax"], 3, position) for position in (0, 16, 32, 47, 63)]


def test_a_token_is_timed_after_others_with_the_bytes_that_they_need(models, clock):
    clock["seconds"] = lambda name: {"linear": 1.0, "softmax": 2.0}[name]
    found = images_speed.token(models, 70, 3, 2, unwatched)
    assert found["seconds"] == {"linear": 1.0, "softmax": 2.0}
    # Two heads of four channels, fp32: keys and values of each token, and a length; sums with one more column.
    assert found["bytes"] == {"linear": 3 * 4 * 2 * 4 * 5, "softmax": 3 * (4 * 2 * 2 * 4 * 70 + 8)}
    assert found["left_out"] == {}


def test_states_too_large_for_the_memory_are_left_out(models, clock, monkeypatch):
    monkeypatch.setattr(case, "available", lambda: 0.02)
    clock["seconds"] = lambda name: 1.0
    found = images_speed.token(models, 500, 1, 1, unwatched)
    assert list(found["seconds"]) == ["linear"]
    assert list(found["bytes"]) == ["linear", "softmax"]
    assert found["left_out"]["softmax"].startswith("its states would need 0 MB of memory, and 0 are free")


def test_what_the_publication_draws_without_a_state_is_recomputed_too(clock):
    torch.manual_seed(0)
    name = "reformer(chunk=4, buckets=4, rounds=1)"
    models = {one: Decoder(SMALL.config(one, 17, 64)).eval() for one in ("linear", name)}
    assert not images_speed.grows(models[name])
    clock["seconds"] = lambda name: 1.0
    found = images_speed.images(models, 64, 2, 1, unwatched)
    assert list(found["seconds"]) == ["linear", name, f"{name}, prefix recomputed"]


def test_a_longer_model_is_the_same_at_every_position_that_the_short_one_has(models):
    for model in models.values():
        longer = images_speed.extended(model, 150)
        tokens = torch.randint(0, 17, (2, 64), generator=torch.Generator().manual_seed(0))
        assert torch.equal(longer(tokens)[0], model(tokens)[0])
        table, short = longer.embedding.table.weight, model.embedding.table.weight
        assert torch.equal(table, short[torch.arange(150) % 64])
        assert images_speed.extended(model, 64) is model
    free = Decoder(DecoderConfig(dim=8, depth=1, heads=2, positions="none"))
    assert images_speed.extended(free, 999) is free


# Tables


def test_published_gains_are_those_that_the_paper_speaks_of():
    gains = {}
    for name, rows in paper.IMAGES.items():
        by = {(row.name, row.state): row for row in rows}
        linear, kept, again = by["linear", True], by["softmax", True], by["softmax", False]
        gains[name] = [
            linear.images_per_second / again.images_per_second,
            linear.images_per_second / kept.images_per_second,
            kept.cpu / linear.cpu,
            again.cpu / linear.cpu,
        ]
    assert gains["mnist"] == pytest.approx([317, 18.9, 1.3, 13.2], rel=0.04)
    assert gains["cifar10"] == pytest.approx([4462, 55.8, 1.6, 191.8], rel=0.01)
    assert paper.methods("mnist:somewhere") == paper.IMAGES["mnist"]
    assert paper.methods("digits") == ()


def test_nothing_published_is_shown_for_other_data():
    result = json.loads((reproduction.RESULTS / "images.json").read_text(encoding="utf-8"))
    kept = images_report.tables(result)
    result["settings"]["data"] = "digits"
    bits, speed, *_ = images_report.tables(result)
    assert len(speed[0]) == len(kept[1][0]) - 2
    assert not [row for row in (*bits, *speed) if "not in this run" in row]
    # What has not been measured yet is not there, either.
    assert [len(table) for table in images_report.tables({**result, "rows": []})] == [1, 1, 1, 1]


def test_the_experiment_in_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "images", "--quick", "--debug"]) == 0
    out, err = capsys.readouterr()
    # The lines that trainings print without a terminal.
    assert err.count("steps; best checkpoint: ") == 2
    assert "error" not in err
    kinds = {f"images-{kind}-{name}.png" for kind in ("samples", "completions") for name in ("linear", "softmax")}
    assert {path.name for path in Path("reproduce").iterdir()} == {
        "images.json",
        "images.md",
        "images.png",
        "images-work",
        *kinds,
    }
    assert all(name in out for name in kinds)
    result = json.loads(Path("reproduce/images.json").read_text())
    assert result["data"] == {"digits": data.load("digits").checksum}
    assert [row["what"] for row in result["rows"]] == ["training"] * 2 + ["images"] * 2 + ["token"] * 4
    with Image.open("reproduce/images.png") as image:
        assert min(image.size) > 600
