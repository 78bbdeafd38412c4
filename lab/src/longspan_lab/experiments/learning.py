"""Resumable training of small models."""

import csv
import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from longspan._utils import atomic_io
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, begun, fit, rate

from .experiment import Place, Row, drawing

M = TypeVar("M", bound=nn.Module)
KEEP = 100  # updates between two evaluations; the training is saved after each


class Learning(NamedTuple):
    """One training: ``loss(model, step)`` is that of one update, ``look(model)`` returns a point of the curve.

    Random numbers of a step depend on ``seed`` and the step.
    """

    name: str
    seed: int
    steps: int
    rate: float
    loss: Callable[[Any, int], Tensor]
    look: Callable[[Any], Any]
    every: int = 0  # updates between two evaluations; 0: KEEP


def slug(spec: str) -> str:
    """Return a spec as part of a file name.

    >>> slug("softmax(kv_heads=2)")
    'softmax-kv_heads-2'
    """
    return re.sub(r"\W+", "-", spec).strip("-")


def parameters(model: nn.Module) -> int:
    """Number of learned parameters."""
    return sum(p.numel() for p in model.parameters())


def closest(count: Callable[[int], int], wanted: int) -> int:
    """The number from 1 on whose ``count``, which grows with it, is closest to ``wanted``."""
    low, high = 1, 1
    while count(high) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < wanted else (low, middle)
    return min((low, high), key=lambda number: abs(count(number) - wanted))


def fresh(config: DecoderConfig, seed: int) -> Decoder:
    """A decoder as ``born`` makes it."""
    return born(lambda: Decoder(config), seed)


def born(make: Callable[[], M], seed: int) -> M:
    """A model with PyTorch's initialization, which depends on the seed alone.

    Ours, with a deviation of 0.02, suit wider models.
    """
    with drawing(seed, "weights"):
        model = make()
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()
    return model


def finite(loss: Tensor, where: str, flag: str = "--rate") -> Tensor:
    """Return the loss. Raises ValueError if it is not finite, before it reaches the weights."""
    if not math.isfinite(value := loss.item()):
        raise ValueError(f"the loss became {value} {where}; a lower {flag} may help")
    return loss


def resumed(place: Place, name: str, **parts: Any) -> Row | None:
    """Return what ``keep`` last saved, loaded into the model, the optimizer and the like; None if there is nothing."""
    kept = place.load(name)
    if kept is not None:
        for part, module in parts.items():
            module.load_state_dict(kept[part])
    return kept


def keep(place: Place, name: str, now: Row, **parts: Any) -> None:
    """Save values with the state of the model, the optimizer and the like."""
    place.save(name, now | {part: module.state_dict() for part, module in parts.items()})


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of the optimizer, with gradients of norm 1 at most."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def learn(model: nn.Module, learning: Learning, place: Place) -> list[Row]:
    """Train with AdamW, a cosine and a warm-up of a tenth -> the curve: every evaluation, with its ``step``.

    Raises ValueError for a loss that is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.rate, weight_decay=0.0, betas=(0.9, 0.98))
    run = TrainConfig(steps=learning.steps, learning_rate=learning.rate, warmup=max(1, learning.steps // 10))
    first, curve, every = 0, [], learning.every or KEEP
    if kept := resumed(place, learning.name, model=model, optimizer=optimizer):
        first, curve = kept["step"], kept["curve"]
    for step in place.track(range(first, learning.steps), learning.steps - first, learning.name):
        optimizer.param_groups[0]["lr"] = rate(run, step)
        with drawing(learning.seed, "step", step):
            loss = finite(learning.loss(model, step), f"at step {step} of {learning.name}")
            update(model, optimizer, loss)
        done = step + 1
        if done % every == 0 or done == learning.steps:
            with torch.no_grad():
                curve.append({"step": done, **learning.look(model)})
            keep(place, learning.name, {"step": done, "curve": curve}, model=model, optimizer=optimizer)
    return curve


def train_decoder(config: DecoderConfig, run: TrainConfig, *, lines: bool = False) -> Decoder:
    """Train as ``longspan train`` does, or resume; return the best checkpoint, on the GPU if there is one.

    Args:
        config: The model's.
        run: The training's.
        lines: Whether to print lines of progress without a terminal too, as of a training that takes hours.
    """
    fit(config, run, resume=begun(run.out), progress=lines or sys.stderr.isatty())
    return trained(Path(run.out)).to("cuda" if torch.cuda.is_available() else "cpu")


def trained(folder: Path) -> Decoder:
    """The best checkpoint of a training. Raises ValueError if there is none."""
    try:
        return checkpoint.load(folder)
    except ValueError as error:
        raise ValueError(f"{error}; delete the experiment's JSON, too, so that the models are trained again") from error


def curve(folder: Path) -> list[list]:
    """A training's evaluations: [[steps made, seconds, validation bits per dim]].

    The seconds are those of the training, evaluations included; those of each process that took part are summed.
    """
    found, before, last = [], 0.0, 0.0
    for row in csv.DictReader(io.StringIO(atomic_io.read_text(folder / "metrics.csv"), newline="")):
        seconds = float(row["seconds"])
        # A process that resumes a training counts from zero.
        before, last = before + (last if seconds < last else 0.0), seconds
        if row["validation_bits"]:
            found.append([int(row["step"]), round(before + seconds, 2), round(float(row["validation_bits"]), 5)])
    return found
