"""What ``eval`` and ``generate`` share: a trained model, and the data that it knows."""

import math
from pathlib import Path
from typing import Any

from .._utils.spec import known
from ..data import Dataset, load
from ..models import checkpoint, pretrained

# Kind of data -> picture and levels, for sampling on a machine that has the model but not the data.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "digits": ((8, 8), 17),
    "mnist": ((28, 28), 256),
    "cifar10": ((32, 32, 3), 256),
    "text": ((), 256),
}
PAIRS, LABELS = "pairs", "labels"
# Kind of data -> kind of model that reads it; a decoder reads all others.
READERS = {PAIRS: "seq2seq", LABELS: "encoder"}
# Kinds of models that write tokens, and the kind that reads speech.
WRITERS, TRANSCRIBER = ("decoder", "seq2seq"), "transcriber"
DOWNLOADED = ("mnist", "cifar10")


def model(folder: str, data: str, *kinds: str) -> tuple[Any, str, int]:
    """-> a model, name of its data, tokens per example of a text or most of a pair or labelled text (0: the default).

    ``kinds`` are those of models that serve: decoders and encoder-decoders, if nothing is said.
    ``folder`` may also name a model that comes with the package. ``data`` takes the place of the data that the model
    was trained on. Raises ValueError for a folder that is no checkpoint, a model of another kind, a checkpoint that
    does not say on which data it was trained, and for data of another kind than the model's.
    """
    path, header = _header(folder, *(kinds or WRITERS))
    if header["kind"] == "encoder" and not header["config"].get("labels"):
        raise ValueError(f"{folder} holds an encoder without labels; a classifier has them, trained on labels:FILE")
    run = header.get("run") or {}
    name = data or run.get("data", "")
    if not name:
        raise ValueError(f"{folder} does not say on which data it was trained; name it by --data, e.g. --data digits")
    length = run.get("length", 0) if kind(name) == kind(run.get("data", "text")) else 0
    if READERS.get(kind(name), "decoder") != header["kind"]:
        reads = {"seq2seq": "a source, so its data are pairs:FILE", "encoder": "texts with labels, so labels:FILE"}
        said = reads.get(header["kind"], "images or text, without sources and labels")
        article = "an" if header["kind"] == "encoder" else "a"
        raise ValueError(f"{folder} holds {article} {header['kind']}, which reads {said}; {name} does not fit")
    return pretrained.load(folder) if pretrained.is_pretrained_name(folder) else checkpoint.load(path), name, length


def transcriber(folder: str) -> Any:
    """A transcriber in eval mode; ``folder`` may also name one that comes with the package.

    Raises ValueError for a folder that is no checkpoint, and for a model of another kind.
    """
    path, _ = _header(folder, TRANSCRIBER)
    return pretrained.load(folder) if pretrained.is_pretrained_name(folder) else checkpoint.load(path)


def sizes(folder: str, *fields: str) -> dict[str, Any]:
    """Some fields of a trained decoder's config; ``folder`` as for ``model``, which says what is raised."""
    return {field: _header(folder, "decoder")[1]["config"][field] for field in fields}


def _header(folder: str, *kinds: str) -> tuple[Path, dict[str, Any]]:
    path = pretrained.path(folder) if pretrained.is_pretrained_name(folder) else _resolve(folder, *kinds)
    header = checkpoint.read_config(path)
    if header["kind"] not in kinds:
        article = "an" if header["kind"] == "encoder" else "a"
        able = "a decoder predicts and generates tokens"
        if TRANSCRIBER in kinds:
            able = "a transcriber tells what is said, such as longspan reproduce speech trains"
        elif header["kind"] == TRANSCRIBER:
            able += f"; what is said in a recording is told by longspan transcribe {folder} FILE.wav"
        raise ValueError(f"{folder} holds {article} {header['kind']}; only {able}")
    return path, header


def dataset(model: Any, name: str, length: int) -> Any:
    """Load a data set for a model. Raises ValueError where the two do not fit and where the data cannot be had."""
    if name == "text":
        raise ValueError("the text that this model has read does not come with it; name one: --data text:FILE")
    try:
        found = load(name, length)
    except ValueError as error:
        if name not in DOWNLOADED:
            raise
        raise ValueError(f"{error}; where its files are at hand, name their folder: --data {name}:FOLDER") from error
    _fits(model, name, found.vocab, found.length)
    if kind(name) == LABELS:
        found = found.renumbered(model.config.labels.split())
    return found


def shape(model: Any, name: str) -> Dataset:
    """A data set without its examples: what is needed to draw pictures. Raises ValueError where the two do not fit."""
    grid, vocab = SHAPES[kind(name)]
    length = math.prod(grid) if grid else 0
    _fits(model, name, vocab, length)
    return Dataset(name, vocab, length, grid, "dim" if grid else "byte", "", {}, {})


def _resolve(folder: str, *kinds: str) -> Path:
    try:
        return checkpoint.resolve(folder)
    except ValueError as error:
        if Path(folder).exists() or Path(folder).name != folder or not (names := pretrained.names(*kinds)):
            raise
        raise ValueError(f"{error}, nor is it a model inside longspan: {', '.join(names)}") from error


def kind(name: str) -> str:
    """The kind of data of a name: text of text:FILE. Raises ValueError for an unknown one."""
    return known(name.partition(":")[0], {**SHAPES, PAIRS: None, LABELS: None}, "data set")


def _fits(model: Any, name: str, vocab: int, length: int) -> None:
    config = model.config
    if config.vocab != vocab:
        raise ValueError(f"the model has vocab={config.vocab}, and {name} has {vocab} levels; choose other --data")
    if config.positions == "learned" and config.length < length:
        raise ValueError(f"the model has {config.length} learned positions, and {name} has {length} tokens per example")
