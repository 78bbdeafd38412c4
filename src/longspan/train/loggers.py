"""Where metrics go besides metrics.csv: TensorBoard, Weights & Biases, or nowhere."""

import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from .._utils import atomic_io
from .._utils.optional_deps import need
from .config import TrainConfig
from .report import Events

NAME = "wandb.txt"  # file of the run directory that names the run of Weights & Biases


class Logger(Protocol):
    """Takes the rows of metrics.csv."""

    def write(self, row: dict[str, Any], step: int) -> None:
        """Log the numbers of a step."""

    def close(self) -> None:
        """Finish."""


class Nowhere:
    """Metrics go to metrics.csv only."""

    def write(self, row: dict[str, Any], step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Wandb:
    """A run of Weights & Biases, which a resumed training continues.

    The project is that of the environment variable WANDB_PROJECT, by default longspan. Other variables of the package
    hold, too, such as WANDB_MODE=offline.

    Args:
        folder: the run directory, which gets the files of the package and its name of the run.
        settings: the configs of the model and of the run, as plain values.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        need("the logger of Weights & Biases", "wandb")
        import wandb  # pyright: ignore[reportMissingImports] (optional)

        path = folder / NAME
        if not path.exists():
            atomic_io.write(path, f"{secrets.token_hex(8)}\n".encode())
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "longspan"),
            id=atomic_io.read_text(path).strip(),
            name=os.environ.get("WANDB_NAME", folder.absolute().name),
            dir=str(folder),
            config=settings,
            resume="allow",
        )

    def write(self, row: dict[str, Any], step: int) -> None:
        """Log the numbers of a step."""
        self.run.log(row, step=step)

    def close(self) -> None:
        """Finish the run, after its metrics are sent."""
        self.run.finish()


def build(run: TrainConfig, step: int, settings: dict[str, Any]) -> Logger:
    """Make the logger of ``run.logger``; ``step``: where the run resumes."""
    folder = Path(run.out)
    match run.logger:
        case "tensorboard":
            return Events(folder / "tensorboard", step)
        case "wandb":
            return Wandb(folder, settings)
    return Nowhere()
