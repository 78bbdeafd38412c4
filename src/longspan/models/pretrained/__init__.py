"""Trained models that come with the package, each a checkpoint with a record of its training."""

from pathlib import Path
from typing import Any

from ..._utils import atomic_io, sealed_dir
from ..._utils.spec import known
from .. import checkpoint

FOLDER = Path(__file__).parent
RECORD = "record.json"


def names(*kinds: str) -> tuple[str, ...]:
    """The models that are here: of these kinds, ``decoder`` and so on, or all."""
    found = sorted(path.parent for path in FOLDER.glob(f"*/{checkpoint.CONFIG}"))
    return tuple(path.name for path in found if not kinds or checkpoint.read_config(path)["kind"] in kinds)


def path(name: str) -> Path:
    """The checkpoint of a model. Raises ValueError for a name that none has."""
    known(name, dict.fromkeys(names()), "model inside longspan")
    return FOLDER / name


def load(name: str) -> Any:
    """A model in eval mode on the CPU: in float32, with the values of the bfloat16 weights that its checkpoint holds.

    Raises ValueError for a name that none has.
    """
    return checkpoint.load(path(name)).float()


def record(name: str) -> dict[str, Any]:
    """How a model was trained, on what, and what it scored.

    Raises ValueError for a name that none has, and for a record that is damaged.
    """
    file = path(name) / RECORD
    return sealed_dir.parsed(file, atomic_io.read(file))


def is_pretrained_name(folder: str) -> bool:
    """Whether these words name a model that is here, and no folder, which would come first."""
    return folder in names() and not Path(folder).exists()
