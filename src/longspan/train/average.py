"""An exponential moving average of the weights, kept in checkpoints beside the weights themselves."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models import checkpoint

ENTRY = "average"  # of the training state in a checkpoint


class Average:
    """The average of a model's parameters over the steps of a run, in float32.

    After step t, from 1 on, the average moves to the parameters by 1 - min(decay, t / (t + 9)), so that the first
    steps, with weights near the initial ones, are soon forgotten.

    Args:
        decay: the weight that the average keeps in each step, below 1.

    Raises:
        ValueError: for parameters that are shared among processes.
    """

    def __init__(self, decay: float):
        self.decay = decay
        self.values: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move to the parameters after ``step``."""
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        if not self.values:
            if sharded := [name for name, parameter in own.items() if hasattr(parameter, "full_tensor")]:
                raise ValueError(
                    f"ema={self.decay} requires whole weights in each process, but {sharded[0]} is sharded; pass ema=0"
                )
            self.values = {name: parameter.float().clone() for name, parameter in own.items()}
        decay = min(self.decay, step / (step + 9))
        for name, parameter in own.items():
            # After a resume the tensors of the checkpoint are on the CPU.
            self.values[name] = self.values[name].to(parameter.device).lerp_(parameter.float(), 1 - decay)


def load_average(model: nn.Module, folder: str | Path) -> None:
    """Replace the parameters of ``model`` by the average in its checkpoint.

    Args:
        model: the model of the checkpoint.
        folder: a checkpoint, or the folder of a run, whose best checkpoint is taken.

    Raises:
        ValueError: for a checkpoint without an average.
    """
    place = checkpoint.resolve(folder)
    found: Any = checkpoint.load_training(place).get(ENTRY)
    if not found:
        raise ValueError(f"{place} has no average of weights; train with run.ema, e.g. --run.ema 0.999")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found[name])
