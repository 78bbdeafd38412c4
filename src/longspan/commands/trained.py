"""What ``eval`` and ``generate`` share: a trained decoder, and the data that it knows."""

import math
from pathlib import Path
from typing import Any

from .. import checkpoint, shipped
from ..data import Dataset, load
from ..spec import known

# Kind of data -> picture and levels, for sampling on a machine that has the model but not the data.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "digits": ((8, 8), 17),
    "mnist": ((28, 28), 256),
    "cifar10": ((32, 32, 3), 256),
    "text": ((), 256),
}
DOWNLOADED = ("mnist", "cifar10")


def decoder(folder: str, data: str) -> tuple[Any, str, int]:
    """-> model, name of its data, tokens per example of a text (0: the default).

    ``folder`` may also name a model that comes with the package. ``data`` takes the place of the data that the model
    was trained on. Raises ValueError for a folder that is no checkpoint, an encoder, and a checkpoint that does not say
    on which data it was trained.
    """
    path, header = _header(folder)
    run = header.get("run") or {}
    name = data or run.get("data", "")
    if not name:
        raise ValueError(f"{folder} does not say on which data it was trained; name it by --data, e.g. --data digits")
    length = run.get("length", 0) if _kind(name) == _kind(run.get("data", "text")) else 0
    return shipped.load(folder) if shipped.means(folder) else checkpoint.load(path), name, length


def sizes(folder: str, *fields: str) -> dict[str, Any]:
    """Some fields of a trained decoder's config; ``folder`` as for ``decoder``, which says what is raised."""
    return {field: _header(folder)[1]["config"][field] for field in fields}


def _header(folder: str) -> tuple[Path, dict[str, Any]]:
    path = shipped.path(folder) if shipped.means(folder) else _resolve(folder)
    header = checkpoint.read_config(path)
    if header["kind"] != "decoder":
        raise ValueError(f"{folder} holds an {header['kind']}; only a decoder predicts and generates tokens")
    return path, header


def dataset(model: Any, name: str, length: int) -> Dataset:
    """Load a data set for a model. Raises ValueError where the two do not fit and where the data cannot be had."""
    try:
        found = load(name, length)
    except ValueError as error:
        if name not in DOWNLOADED:
            raise
        raise ValueError(f"{error}; where its files are at hand, name their folder: --data {name}:FOLDER") from error
    _fits(model, name, found.vocab, found.length)
    return found


def shape(model: Any, name: str) -> Dataset:
    """A data set without its examples: what is needed to draw pictures. Raises ValueError where the two do not fit."""
    grid, vocab = SHAPES[_kind(name)]
    length = math.prod(grid) if grid else 0
    _fits(model, name, vocab, length)
    return Dataset(name, vocab, length, grid, "dim" if grid else "byte", "", {}, {})


def _resolve(folder: str) -> Path:
    try:
        return checkpoint.resolve(folder)
    except ValueError as error:
        if Path(folder).exists() or Path(folder).name != folder or not shipped.names():
            raise
        raise ValueError(f"{error}, nor is it a model inside longspan: {', '.join(shipped.names())}") from error


def _kind(name: str) -> str:
    return known(name.partition(":")[0], SHAPES, "data set")


def _fits(model: Any, name: str, vocab: int, length: int) -> None:
    config = model.config
    if config.vocab != vocab:
        raise ValueError(f"the model has vocab={config.vocab}, and {name} has {vocab} levels; choose other --data")
    if config.positions == "learned" and config.length < length:
        raise ValueError(f"the model has {config.length} learned positions, and {name} has {length} tokens per example")
