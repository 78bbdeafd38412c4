"""Checkpoints in parts, one file for each process, of models that ``fully_shard`` has sharded."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from .._utils import atomic_io, sealed_dir
from . import checkpoint, shards
from .checkpoint import TRAINING, WEIGHTS


def save(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    folder: str | os.PathLike,
    *,
    training: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> None:
    """Write a checkpoint in parts, one file for each process, atomically; all processes call this together.

    Args:
        model: The model, of which only the config is stored.
        tensors: The weights (``model.NAME``) and other tensors, sharded or not.
        folder: The folder of the checkpoint.
        training: Plain values and tensors of the first process that :func:`checkpoint.load_training` returns.
        extra: As for :func:`checkpoint.save`.

    Raises:
        ValueError: In all processes, if the folder cannot be written, or for NaN weights.
    """
    folder, header, first = checkpoint.place_of(folder), checkpoint.checked_header(model, extra), dist.get_rank() == 0
    with contextlib.ExitStack() as stack:
        made = ["", ""]
        if first:
            try:
                checkpoint.refuse_foreign(folder)
                folder.parent.mkdir(parents=True, exist_ok=True)
                made[0] = str(stack.enter_context(atomic_io.new_folder(folder)))
            except (OSError, ValueError) as error:
                made[1] = str(error)
        temporary = Path(_shared(made)[0])
        own = {name: (t.to_local() if isinstance(t, DTensor) else t) for name, t in tensors.items()}
        problem = ""
        try:
            checkpoint.refuse_nan("the model", {name: t for name, t in own.items() if name.startswith("model.")})
        except ValueError as error:
            problem = str(error)
        _agreed(problem)
        try:
            shards.write(tensors, temporary)
            if first:
                checkpoint.write_training(dict(training), temporary / TRAINING)
                if text := getattr(model, "tokenizer", ""):
                    (temporary / checkpoint.TOKENIZER).write_text(text, encoding="utf-8")
                sealed_dir.seal(temporary, header)
                sealed_dir.swap(temporary, folder)
        except (OSError, ValueError) as error:
            problem = f"cannot write the checkpoint {folder}: {checkpoint.first_line(error)}"
        # No process goes on before the checkpoint is complete.
        _agreed(problem)


def _shared(values: list[str]) -> list[str]:
    """The values of the first process: a result and an error, which all processes raise as ValueError."""
    dist.broadcast_object_list(values)
    if values[1]:
        raise ValueError(values[1])
    return values


def _agreed(problem: str) -> None:
    """Raise ValueError in all processes if one of them has a problem."""
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if found := [one for one in problems if one]:
        raise ValueError(found[0])


def consolidate(folder: str | Path, out: str | Path | None = None) -> Path:
    """Add ``model.safetensors`` with the whole weights to a checkpoint in parts, or write them elsewhere.

    Args:
        folder: A checkpoint, or the folder of a training run: its best checkpoint.
        out: A folder for a checkpoint with the whole weights only; None: add them to the checkpoint itself.

    Returns:
        The folder with ``model.safetensors``.

    Raises:
        ValueError: If the folder is not a checkpoint, or cannot be written.
    """
    place, header, weights, tokenizer = checkpoint.read(folder)
    if out is None and WEIGHTS in header["files"]:
        return place
    target = place if out is None else checkpoint.place_of(out)
    names = [name for name in header["files"] if out is None]
    rest = {name: value for name, value in header.items() if name not in ("format", "files", "sha256")}
    checkpoint.refuse_nan(place, weights)
    try:
        if out is not None:
            checkpoint.refuse_foreign(target)
            target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_io.new_folder(target) as temporary:
            for name in names:
                _link(sealed_dir.resolve_replaced(place) / name, temporary / name)
            if tokenizer and checkpoint.TOKENIZER not in names:
                (temporary / checkpoint.TOKENIZER).write_text(tokenizer, encoding="utf-8")
            safetensors.torch.save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
            sealed_dir.seal(temporary, rest)
            sealed_dir.swap(temporary, target)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"cannot write the checkpoint {target}: {checkpoint.first_line(error)}") from error
    return target


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def restore(folder: str | Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fill tensors from a checkpoint in parts; all processes call this together.

    Args:
        folder: The checkpoint.
        tensors: The tensors to fill, sharded for any number of processes, with the names of :func:`save`.

    Returns:
        What :func:`checkpoint.load_training` returns.

    Raises:
        ValueError: If the checkpoint is not in parts, was changed, or has other tensors.
    """
    with checkpoint.opened(folder, TRAINING) as (place, header, content):
        training, problem = checkpoint.parse_training(place, content(TRAINING)), ""
        try:
            shards.verify(place, header["files"], dist.get_rank(), dist.get_world_size())
            found = shards.shapes(place)
            wrong = [
                n for n in {**found, **tensors} if n not in found or n not in tensors or found[n][0] != tensors[n].shape
            ]
            if wrong:
                problem = f"{place} does not fit the model; {len(wrong)} tensors differ: {', '.join(wrong[:3])}"
        except ValueError as error:
            problem = str(error)
        _agreed(problem)
        shards.read_into(tensors, place)
    return training


def shapes(folder: str | Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of the tensors of a checkpoint in parts; empty for another checkpoint."""
    with checkpoint.opened(folder) as (place, header, _):
        return shards.shapes(place) if shards.INDEX in header["files"] else {}
