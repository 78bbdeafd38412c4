"""Loading of a trained model and its data, shared by ``eval``, ``generate`` and ``transcribe``."""

import math
from pathlib import Path
from typing import Any, NamedTuple, cast

from .._utils import progress
from .._utils.spec import known
from ..data import Dataset, Labeled, Tokens, load, tokens
from ..models import checkpoint, pretrained

# Kind of data -> image shape and number of levels (0: the model's), to sample on a machine without the data.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "digits": ((8, 8), 17),
    "mnist": ((28, 28), 256),
    "cifar10": ((32, 32, 3), 256),
    "text": ((), 256),
    "tokens": ((), 0),
}
PAIRS, LABELS = "pairs", "labels"
# Kind of data -> kind of model that reads it; a decoder reads all others.
READERS = {PAIRS: "seq2seq", LABELS: "encoder"}
# Kinds of models that write tokens, and the kind that reads speech.
WRITERS, TRANSCRIBER = ("decoder", "seq2seq"), "transcriber"
DOWNLOADED = ("mnist", "cifar10")


class Trained(NamedTuple):
    """A trained model and its data."""

    model: Any
    """the model in eval mode"""
    data: str
    """the name of its data set"""
    length: int
    """the length of an example in tokens: exact for a text, the largest for pairs and labeled texts, 0 for the data
    set's default"""
    checksum: str
    """the checksum of the data that it was trained on, if no others were named; "" if it is unknown"""


def model(folder: str, data: str, *kinds: str, ema: bool = False) -> Trained:
    """Load a trained model and look up its data.

    Args:
        folder: a run directory, a checkpoint directory, or a pretrained model.
        data: a data set that replaces the one of the training; "": that one.
        kinds: accepted kinds of models; by default decoders and encoder-decoders.
        ema: take the average of the weights, which training with ``run.ema`` keeps.

    Raises:
        ValueError: for a folder without a checkpoint, a model of another kind, a checkpoint that does not record its
            data, data that the model cannot read, and a checkpoint without an average.
    """
    path, header = _header(folder, *(kinds or WRITERS))
    if header["kind"] == "encoder" and not header["config"].get("labels"):
        raise ValueError(
            f"{folder} holds an encoder without labels; this command needs a classifier, trained on labels:FILE"
        )
    run = header.get("run") or {}
    name = data or run.get("data", "")
    if not name:
        raise ValueError(f"{folder} does not record its training data; pass --data, e.g. --data digits")
    # A model of tokens reads a text by its tokenizer.
    alike = {"tokens": "text"}
    before, now = (kind(one) for one in (run.get("data", "text"), name))
    length = run.get("length", 0) if alike.get(before, before) == alike.get(now, now) else 0
    if READERS.get(kind(name), "decoder") != header["kind"]:
        reads = {"seq2seq": "pairs:FILE", "encoder": "labels:FILE"}
        needed = reads.get(header["kind"], "images or text")
        article = "an" if header["kind"] == "encoder" else "a"
        raise ValueError(
            f"{folder} holds {article} {header['kind']}, which cannot read {name}; pass --data with {needed}"
        )
    found = pretrained.load(folder) if pretrained.is_pretrained_name(folder) else checkpoint.load(path)
    if ema:
        from ..train.average import load_average

        load_average(found, path)
    return Trained(found, name, length, "" if data else header.get(checkpoint.DATA, ""))


def teacher(folder: str, data: str) -> Trained:
    """Load a trained decoder, or an encoder of any texts, and look up its data; arguments and errors as in ``model``.

    The data are a text or tokens, whatever an encoder was trained on.
    """
    path, header = _header(folder, "decoder", "encoder")
    if header["kind"] == "decoder":
        return model(folder, data, "decoder")
    return Trained(checkpoint.load(path), data, 0, "")


def transcriber(folder: str) -> Any:
    """Load a transcriber in eval mode from a checkpoint directory or a pretrained model.

    Raises ValueError for a folder without a checkpoint, and for a model of another kind.
    """
    path, _ = _header(folder, TRANSCRIBER)
    return pretrained.load(folder) if pretrained.is_pretrained_name(folder) else checkpoint.load(path)


def sizes(folder: str, *fields: str) -> dict[str, Any]:
    """Some fields of a trained decoder's config. Argument and errors as in ``model``."""
    return {field: _header(folder, "decoder")[1]["config"][field] for field in fields}


def _header(folder: str, *kinds: str) -> tuple[Path, dict[str, Any]]:
    path = pretrained.path(folder) if pretrained.is_pretrained_name(folder) else _resolve(folder, *kinds)
    header = checkpoint.read_config(path)
    if header["kind"] not in kinds:
        article = "an" if header["kind"] == "encoder" else "a"
        able = "a decoder predicts and generates tokens"
        if TRANSCRIBER in kinds:
            able = "a transcriber reads speech; longspan reproduce speech trains one"
        elif header["kind"] == TRANSCRIBER:
            able += f"; for speech run longspan transcribe {folder} FILE.wav"
        elif header["kind"] == checkpoint.CHANGES:
            able += f"; {checkpoint.RESULTS}"
        raise ValueError(f"{folder} holds {article} {header['kind']}; only {able}")
    return path, header


def dataset(trained: Trained, length: int, *, short: bool = False) -> Any:
    """Load the data set of a trained model.

    Args:
        trained: the model and the name of its data.
        length: tokens per example; 0: as in training.
        short: as in ``data.load``, with a line on stderr for such data.

    Raises:
        ValueError: if the data cannot be loaded or do not fit the model, or differ from those of its training although
            no others were named.
    """
    model, name, length = trained.model, trained.data, length or trained.length
    if name in ("text", "tokens"):
        raise ValueError("the training text of this model is not part of longspan; pass --data text:FILE")
    tokenizer = getattr(model, "tokenizer", "")
    try:
        if tokenizer and kind(name) == "text":
            found = tokens.encoded(tokenizer, name.partition(":")[2], length, short)
        else:
            found = load(name, length, short=short)
    except ValueError as error:
        if name not in DOWNLOADED:
            raise
        raise ValueError(f"{error}; if you have its files, pass --data {name}:FOLDER") from error
    if isinstance(found, Tokens) and tokenizer and found.tokenizer != tokenizer:
        raise ValueError(
            f"{name} has tokens of another tokenizer than the model; encode its text with that of the model"
        )
    if trained.checksum not in ("", found.checksum):
        raise ValueError(
            f"{name} has changed since the model was trained on it: its sha256 is {found.checksum} instead of "
            f"{trained.checksum}; restore it, or pass --data {name} to take it as it is"
        )
    _fits(model, name, found.vocab, found.length)
    if short and found.splits["train"] is found.splits["test"]:
        progress.say(f"{name} is too short for held-out parts: each split is the whole of it")
    if kind(name) == LABELS:
        found = cast(Labeled, found).renumbered(model.config.labels.split())
    return found


def shape(model: Any, name: str) -> Dataset:
    """A data set without examples, enough to sample images. Raises ValueError if it does not fit the model."""
    grid, vocab = SHAPES[kind(name)]
    vocab = model.config.vocab if getattr(model, "tokenizer", "") else vocab or model.config.vocab
    length = math.prod(grid) if grid else 0
    _fits(model, name, vocab, length)
    return Dataset(name, vocab, length, grid, "dim" if grid else "byte", "", {}, {})


def _resolve(folder: str, *kinds: str) -> Path:
    try:
        return checkpoint.resolve(folder)
    except ValueError as error:
        if Path(folder).exists() or Path(folder).name != folder or not (names := pretrained.names(*kinds)):
            raise
        raise ValueError(f"{error}, nor is it a pretrained model ({', '.join(names)})") from error


def kind(name: str) -> str:
    """The kind of data of a name: text for text:FILE. Raises ValueError for an unknown one."""
    return known(name.partition(":")[0], {**SHAPES, PAIRS: None, LABELS: None}, "data set")


def _fits(model: Any, name: str, vocab: int, length: int) -> None:
    config = model.config
    if config.vocab != vocab:
        raise ValueError(f"the model has vocab={config.vocab}, but {name} has {vocab} levels; pass other --data")
    if config.positions == "learned" and config.length < length:
        raise ValueError(f"the model has {config.length} learned positions, but {name} has {length} tokens per example")
