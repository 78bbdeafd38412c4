"""Training: a config and a run in, a folder with checkpoints, metrics and the resolved config out.

| in the run's folder | what it is |
|---|---|
| ``config.yaml`` | the config and the run, as a recipe: usable with ``--config`` |
| ``metrics.csv`` | one row every 10 steps and at each evaluation |
| ``tensorboard/`` | the same for TensorBoard |
| ``checkpoints/step-00000100/`` | a checkpoint |
| ``checkpoints/last``, ``checkpoints/best`` | the name of the last one and of the one with the fewest validation bits |

A run that is killed and resumed ends with the same bits as one that is not: batches and random seeds are functions of
the micro-batch's number, and all else is in the checkpoint.
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from .. import checkpoint, data
from ..config import Config
from ..data import Dataset
from ..describe import parts
from ..model import Decoder
from ..ops.pages import reuse_pages
from .evaluate import bits, roomy
from .run import Run, rate

__all__ = ["Result", "Run", "bits", "fit", "rate"]

# A resumed run may change these: they say where and how long, not what.
FREE = ("steps", "devices", "out", "seconds", "save_every", "keep")


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    folder: Path
    """the run's folder; ``longspan.load(folder)`` is its best model"""
    steps: int
    """optimiser steps done, those before a resume included; fewer than asked for if the time was up"""
    seconds: float
    """wall time of this call"""
    bits: dict[str, float]
    """the best checkpoint's bits per dim or byte on "validation" and "test"; empty on ranks other than 0"""


SPLITS = ("validation", "test")


def fit(config: Config, run: Run, *, resume: bool = False, progress: bool = True) -> Result:
    """Train a decoder. ``resume=True`` goes on from the last checkpoint in ``run.out``, or starts if there is none yet.

    ``progress``: a bar on a terminal, and a line per evaluation, on stderr. With ``devices`` > 1 the script or command
    that calls this is started once more per further process (Lightning's launcher), or each is started by torchrun.

    Raises ValueError for a folder that is taken (without ``resume``), has nothing to resume, belongs to another run or
    cannot be written; for a config that does not fit the data; for a loss or gradient that is not finite (the last good
    checkpoint stays). Raises KeyboardInterrupt, with a message that says how to go on, after a Ctrl-C, when the step in
    hand is finished and saved. Raises ImportError without the extra ``train``.
    """
    begin, folder = time.monotonic(), Path(run.out)
    engine = _engine()
    reuse_pages()
    first = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0
    recipe = {"model": asdict(config), "run": asdict(run)}
    if first:
        _claim(folder, recipe, resume)
    last = folder / "checkpoints" / "last"
    start = checkpoint.resolve(folder, prefer="last") if resume and last.exists() else None
    dataset = data.load(run.data, run.length)
    _check(config, run, dataset)
    if first:
        checkpoint.write_text(folder / "config.yaml", yaml.safe_dump(recipe, sort_keys=False))

    bar = engine.Bar(run.steps, dataset.unit) if progress and first else None
    # The caller's random numbers are his: ours start from the seed, and his go on afterwards.
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(run.seed)
        model = Decoder(config)
        steps, stopped, first = engine.train(model, run, dataset, {"run": asdict(run)}, start, bar)
    if not first:
        # Quietly, after an interruption too: the launcher kills rank 0 if it sees another process fail before it.
        return Result(folder, steps, time.monotonic() - begin, {})
    if stopped in ("interrupted", "stopped at once"):
        where = f"{last.read_text().strip()} is saved" if last.exists() else "nothing was saved"
        raise KeyboardInterrupt(f"{stopped} at step {steps}; {where} in {folder}; go on with resume")
    best = checkpoint.load(folder)
    scores = {s: bits(best, dataset, s, roomy(dataset.length), examples=run.evaluate_examples) for s in SPLITS}
    if bar:
        shown = ", ".join(f"{split} {value:.3f}" for split, value in scores.items())
        early = f" ({stopped})" if stopped else ""
        bar.line(f"{steps} steps{early}; best checkpoint: {shown} bits/{dataset.unit}; in {folder}")
    return Result(folder, steps, time.monotonic() - begin, scores)


def _engine() -> Any:
    try:
        from . import engine
    except ImportError as error:
        raise ImportError(f'training needs {error.name}: pip install "longspan[train]"', name=error.name) from error
    return engine


def _claim(folder: Path, recipe: dict[str, Any], resume: bool) -> None:
    """See that the folder can be ours, before any work is done."""
    try:
        taken = folder.is_dir() and any(folder.iterdir())
        if resume and not taken:
            raise ValueError(f"nothing to resume in {folder}; start the run without resume")
        if taken and not resume:
            raise ValueError(f"{folder} is not empty; go on with its run by resume, or choose another folder by out")
        if resume:
            _same(folder, recipe)
        # No more than that yet: a run refused for its settings must not leave a folder that counts as taken.
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write the run's folder {folder}: {error.strerror or error}") from error


def _same(folder: Path, recipe: dict[str, Any]) -> None:
    path = folder / "config.yaml"
    if not path.exists():
        raise ValueError(f"{folder} holds no run: it has no config.yaml; choose another folder by out")
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
        # A field that an older version did not have was as its default is.
        usual = {"model": asdict(Config()), "run": asdict(Run())}
        differ = [
            f"{part}.{name} ({old.get(name, 'absent')} -> {new.get(name, 'absent')})"
            for part, old, new in ((part, usual[part] | before[part], recipe[part]) for part in ("model", "run"))
            for name in dict.fromkeys((*old, *new))
            if old.get(name) != new.get(name) and not (part == "run" and name in FREE)
        ]
        fewer = recipe["run"]["steps"] < before["run"]["steps"]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is corrupt: it holds no model and run") from error
    if fewer:
        differ.append(f"run.steps ({before['run']['steps']} -> {recipe['run']['steps']}; it may only grow)")
    if differ:
        raise ValueError(f"cannot resume {folder} with other settings: {', '.join(differ)}")


def _check(config: Config, run: Run, dataset: Dataset) -> None:
    if config.vocab != dataset.vocab:
        raise ValueError(f"vocab={config.vocab} does not fit {run.data}, whose tokens have {dataset.vocab} levels")
    if config.positions == "learned" and config.length < dataset.length:
        raise ValueError(
            f"length={config.length} learned positions are too few for {run.data}: {dataset.length} tokens per example"
        )
    kinds = {name: cls.penalty for name, cls in parts(config.attention)}
    if run.penalty and not any(kinds.values()):
        raise ValueError(
            f"penalty={run.penalty} weighs losses that mechanisms add of their own, and {', '.join(kinds)} adds none; "
            f"leave it at 0"
        )
    if not dataset.count("train"):
        raise ValueError(f"{run.data} has no training example")
