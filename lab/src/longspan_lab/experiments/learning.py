"""Resumable training of a small model on generated data."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, rate

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


def learn(model: nn.Module, learning: Learning, place: Place) -> list[Row]:
    """Train with AdamW, a cosine and a warm-up of a tenth -> the curve: every evaluation, with its ``step``.

    Raises ValueError for a loss that is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.rate, weight_decay=0.0, betas=(0.9, 0.98))
    run = TrainConfig(steps=learning.steps, learning_rate=learning.rate, warmup=max(1, learning.steps // 10))
    first, curve, every = 0, [], learning.every or KEEP
    kept = place.load(learning.name)
    if kept:
        first, curve = kept["step"], kept["curve"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    for step in place.track(range(first, learning.steps), learning.steps - first, learning.name):
        optimizer.param_groups[0]["lr"] = rate(run, step)
        optimizer.zero_grad()
        with drawing(learning.seed, "step", step):
            finite(learning.loss(model, step), f"at step {step} of {learning.name}").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if done % every == 0 or done == learning.steps:
            with torch.no_grad():
                curve.append({"step": done, **learning.look(model)})
            now = {"step": done, "curve": curve, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            place.save(learning.name, now)
    return curve
