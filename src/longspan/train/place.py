"""The place of a run in its data, from a checkpoint, for any number of devices."""

from pathlib import Path
from typing import Any

from ..models import checkpoint
from .config import TrainConfig

# Attributes of a task that a checkpoint holds in addition to the weights.
KEPT = ("micro", "best", "evaluated", "best_step")
# The place in the data in examples, which an older version did not store.
PLACE = "examples"


def placed(path: Path, training: dict[str, Any], run: TrainConfig) -> dict[str, Any]:
    """The training state of a checkpoint, with the number of micro-batches for the devices of this run.

    The place in the data is a number of examples. Raises ValueError if it is not at the beginning of a micro-batch.
    """
    found = training.get("longspan", {})
    if set(found) - {PLACE} != set(KEPT):
        raise ValueError(f"{path} holds no training state; it cannot be resumed")
    before = checkpoint.read_config(path)["run"]
    taken = found.get(PLACE, found["micro"] * before["batch"] * before["devices"])
    micro, rest = divmod(taken, run.batch * run.readers)
    if rest:
        raise ValueError(
            f"cannot resume {path}, which has read {taken} examples, with {run.batch * run.readers} examples per "
            f"micro-batch: {taken} is not a multiple of it"
        )
    if micro != found["micro"]:
        # Lightning steps when its own count of micro-batches is a multiple of accumulate.
        progress = training["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts.update({name: micro for name, value in counts.items() if value})
    return training | {"longspan": found | {"micro": micro}}
