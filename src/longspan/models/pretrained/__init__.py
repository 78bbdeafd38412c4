"""Pretrained models that come with the package, each a checkpoint with a record of its training."""

from pathlib import Path
from typing import Any

from ..._utils import atomic_io, sealed_dir
from ..._utils.spec import known
from .. import checkpoint

FOLDER = Path(__file__).parent
RECORD = "record.json"


def names(*kinds: str) -> tuple[str, ...]:
    """Return the names of the pretrained models of these kinds, such as ``decoder``, or of all kinds."""
    found = sorted(path.parent for path in FOLDER.glob(f"*/{checkpoint.CONFIG}"))
    return tuple(path.name for path in found if not kinds or checkpoint.read_config(path)["kind"] in kinds)


def path(name: str) -> Path:
    """Return the checkpoint of a pretrained model. Raises ValueError for an unknown name."""
    known(name, dict.fromkeys(names()), "pretrained model")
    return FOLDER / name


def load(name: str) -> Any:
    """Load a pretrained model in eval mode on the CPU; its bfloat16 weights become float32, those of 8 bits stay.

    Raises:
        ValueError: For an unknown name.
    """
    return checkpoint.load(path(name)).float()


def record(name: str) -> dict[str, Any]:
    """Return the record of a pretrained model: its training, its data and its scores.

    Raises:
        ValueError: For an unknown name, and a damaged record.
    """
    file = path(name) / RECORD
    return sealed_dir.parsed(file, atomic_io.read(file))


def forms(name: str) -> tuple[str, ...]:
    """Return the words of which each text of a pretrained model begins with one; () for every other model."""
    return tuple(record(name).get("forms", ())) if is_pretrained_name(name) else ()


def is_pretrained_name(folder: str) -> bool:
    """Whether ``folder`` is the name of a pretrained model and not an existing folder, which takes precedence."""
    return folder in names() and not Path(folder).exists()
