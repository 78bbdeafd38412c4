"""Trainings of experiments depend on their seed alone, and go on with the same figures after an interruption."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from longspan_lab.experiments import (
    agents,
    copying,
    forecast,
    language,
    learning,
    lengths,
    lra,
    lra_models,
    memory,
    ponder,
    protein,
    speech,
    speech_train,
    tasks,
)
from longspan_lab.experiments.experiment import Place


class Training(NamedTuple):
    """Points of an experiment, what is patched to look and keep more often, and which updates are made once more."""

    module: Any
    points: list[dict[str, Any]]
    settings: dict[str, Any]
    patched: tuple[tuple[Any, str, Any], ...]
    interrupted: int  # the update before which it is
    again: Sequence[int]


def quick(module: Any, **settings: Any) -> Any:
    return replace(module.EXPERIMENT.quick, **settings)


OFTEN = ((copying, "EVERY", 2), (copying, "KEEP", 4))
SEEDS = [{"spec": "linear", "seed": seed} for seed in (0, 1)]
KEPT = ((learning, "KEEP", 2),)
TRAININGS = {
    "copy": Training(copying, SEEDS, {"steps": 13, "drop_at": 7}, OFTEN, 10, range(8, 13)),
    "forecast": Training(forecast, [{"model": "linear", "horizon": 6, "seed": 0}], {}, (), 3, [2, 3]),
    "lengths": Training(lengths, lengths.points(quick(lengths)), {"updates": 5}, KEPT, 3, [2, 3, 4]),
    "lra": Training(
        lra,
        [{"what": "training", "task": "image", "mechanism": "routing"}],
        {"examples": 40, "tests": 20, "image_steps": 6, "dim": 16, "heads": 2, "batch": 20},
        (*KEPT, (lra_models, "SIZES", {"routing": "clusters=2, window=8"})),
        4,
        [4, 5],
    ),
    "memory": Training(memory, memory.points(quick(memory))[:2], {"steps": 440}, (), 2, [2, 3]),
    "ponder": Training(ponder, ponder.points(quick(ponder)), {"steps": 5}, KEPT, 3, [2, 3, 4]),
    "protein": Training(protein, [{"task": protein.MASKED, "model": "softmax", "seed": 0}], {}, (), 3, [2, 3]),
}


def weights_in(folder: Path) -> dict[str, list[torch.Tensor]]:
    """The tensors of what points have kept, by file."""
    files = sorted(folder.glob("*.pt"))
    kept = {path.name: tree_leaves(torch.load(path, weights_only=False)) for path in files}
    return {name: [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for name, leaves in kept.items()}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_that_was_interrupted_goes_on_with_the_same_figures(name, tmp_path, monkeypatch):
    if name == "memory":
        for package in tasks.PACKAGES:
            pytest.importorskip(package, reason="the tasks are others': pip install ./lab[reinforcement]")
    one, made = TRAININGS[name], []
    for place, attribute, value in one.patched:
        monkeypatch.setattr(place, attribute, value)
    settings = quick(one.module, **one.settings)

    def counted(items: Any, *_: Any) -> Iterator[int]:
        for item in items:
            made.append(item)
            yield item

    def interrupted(items: Any, *_: Any) -> Iterator[int]:
        for item in items:
            if item == one.interrupted:
                raise KeyboardInterrupt
            yield item

    # All points in one folder: each keeps its own.
    for point in one.points:
        whole = one.module.measure(settings, point, Place(tmp_path / "whole", counted))
        assert made == list(range(one.again[-1] + 1))
        made.clear()
        with pytest.raises(KeyboardInterrupt):
            one.module.measure(settings, point, Place(tmp_path / "parts", interrupted))
        assert one.module.measure(settings, point, Place(tmp_path / "parts", counted)) == whole
        assert made == list(one.again)
        made.clear()
    # Accuracies of few examples can be equal by chance, so the saved weights are compared, too.
    whole, parts = weights_in(tmp_path / "whole"), weights_in(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(all(map(torch.equal, leaves, parts[file])) for file, leaves in whole.items())


SHAPE = lra_models.Shape("softmax", 8, 2, 2, 8, 11, 24, 1, 3)
# The model of a seed.
BUILT = {
    "copy": lambda seed: copying.fresh(quick(copying).config("linear"), seed),
    "language": lambda seed: language.born(replace(quick(language), seed=seed), "gla"),
    "forecast": lambda seed: quick(forecast).model("linear", 7, seed),
    "lra": lambda seed: lra_models.Classifier(SHAPE, seed),
    "memory": lambda seed: agents.born(seed, "GTrXL", 6, 3, 3, depth=2, heads=2, memory=4),
    "protein": lambda seed: quick(protein).model(protein.MASKED, "linear", seed),
    "speech": lambda seed: speech_train.build("linear", quick(speech).config("linear"), seed),
    "speech, an LSTM": lambda seed: speech_train.build("lstm", quick(speech).config("lstm"), seed),
}


@pytest.mark.parametrize("name", BUILT)
def test_weights_are_those_of_the_seed_whatever_was_drawn_before(name):
    found = []
    for before, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(before)
        found.append(BUILT[name](seed).state_dict())
    one, again, other = found
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)
