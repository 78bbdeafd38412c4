"""Every recipe is a config and a run that fit each other, and trains."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from longspan._utils.spec import split
from longspan.cli.entry import main
from longspan.cli.train import completed
from longspan.models import checkpoint
from longspan.train import TrainConfig, fit, recipes

ROOT = Path(__file__).parents[2]
RECIPES = [recipes.find(name) for name in recipes.names()]
# The data sets that are downloaded otherwise.
FOLDERS = {name: ROOT.parent / "shared" / "data" / name for name in ("mnist", "cifar10")}


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request):
    return yaml.safe_load(request.param.read_text(encoding="utf-8"))


def test_there_are_recipes():
    assert {path.stem for path in RECIPES} >= {"digits", "mnist", "cifar10", "text"}


def test_fields_are_known_and_the_run_is_long_enough(recipe):
    assert set(recipe) == {"model", "run"}
    checkpoint.config_of(recipe["model"])
    run = TrainConfig(**recipe["run"])
    assert run.warmup < run.steps
    assert run.evaluate_every <= run.steps
    assert run.save_every <= run.steps


def test_trains(recipe, tmp_path):
    model, run = recipe["model"], recipe["run"]
    folder = FOLDERS.get(run["data"])
    if folder and not folder.is_dir():
        pytest.skip(f"needs the files of {run['data']} in {folder.relative_to(ROOT.parent)}")
    name = f"{run['data']}:{folder}" if folder else run["data"]
    if name.startswith("tokens:"):
        (tmp_path / "numbers.txt").write_text("".join(f"{i * i} is a square.\n" for i in range(2000)))
        words = ["--train-bpe", "300", "--out", str(tmp_path / "tokens")]
        assert main(["tokenize", str(tmp_path / "numbers.txt"), *words]) == 0
        model, name = model | {"vocab": 300}, f"tokens:{tmp_path / 'tokens'}"
    fields = asdict(checkpoint.config_of(model | {"depth": len(split(model["attention"]))}))
    kind = {"kind": model["kind"]} if "kind" in model else {}
    config = checkpoint.config_of(completed(fields | kind, TrainConfig(data=name)))
    short = {"steps": 2, "warmup": 1, "batch": 1, "evaluate_examples": 1, "out": str(tmp_path / "run")}
    result = fit(config, TrainConfig(**run | short | {"data": name}), progress=False)
    assert result.steps == 2
    assert all(math.isfinite(bits) for bits in result.bits.values())
    assert checkpoint.load(tmp_path / "run").config == config
