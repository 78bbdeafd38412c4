"""Checkpoints in parts, one file for each process, of models that ``fully_shard`` has sharded."""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from .._utils import atomic_io, sealed_dir
from ..data import tokenization
from . import checkpoint, shards
from .checkpoint import INDEX, TRAINING, WEIGHTS


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
    with contextlib.ExitStack() as stack:
        target, temporary, header = _begin(stack, model, tensors, folder, extra)
        problem = ""
        try:
            shards.write(tensors, temporary)
            if dist.get_rank() == 0:
                _write_rest(model, temporary, training)
                _complete(temporary, target, header)
        except (OSError, ValueError) as error:
            problem = _unwritten(target, error)
        # No process goes on before the checkpoint is complete.
        _agreed(problem)


class Saving:
    """A checkpoint in parts that the processes write in the background; see :func:`save_async`."""

    def __init__(self, work: Future[str]):
        self.work = work

    def problem(self) -> str:
        """Wait for this process's thread, and return its error; "" for none."""
        return self.work.result()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; all processes call this together.

        Raises:
            ValueError: In all processes, if one of them could not write its part.
        """
        _agreed(self.problem())


def save_async(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    folder: str | os.PathLike,
    *,
    training: Mapping[str, Any],
    extra: Mapping[str, Any],
    group: dist.ProcessGroup,
    done: Callable[[], None],
) -> Saving:
    """As :func:`save`, but return as soon as all tensors have been copied to CPU memory.

    The folder appears after all processes have written their parts. The next call must come after ``wait``.

    Args:
        model: As for :func:`save`.
        tensors: As for :func:`save`; they may change after the call.
        folder: As for :func:`save`.
        training: As for :func:`save`; it is written before the call returns.
        extra: As for :func:`save`.
        group: All processes, on the CPU, in a group that nothing else uses.
        done: What the first process does in its thread after the checkpoint is complete.

    Returns:
        The :class:`Saving`, whose ``wait`` raises the errors of the writing.

    Raises:
        ValueError: In all processes, if the folder cannot be made, or for NaN weights.
    """
    first = dist.get_rank() == 0
    with contextlib.ExitStack() as stack:
        target, temporary, header = _begin(stack, model, tensors, folder, extra)
        early = ""
        try:
            if first:
                _write_rest(model, temporary, training)
        except (OSError, ValueError) as error:
            early = _unwritten(target, error)
        written = shards.write_async(tensors, temporary, group)
        # The temporary folder is locked, and removed after an error, until the thread ends.
        held = stack.pop_all()

    def finish() -> str:
        with held:
            try:
                written()
                if early:
                    return early
                if first:
                    _complete(temporary, target, header)
                    done()
            # Not only the errors of files: whatever it is, `wait` raises it.
            except Exception as error:
                return _unwritten(target, error)
            return ""

    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    work = thread.submit(finish)
    thread.shutdown(wait=False)
    return Saving(work)


def _begin(
    stack: contextlib.ExitStack,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    folder: str | os.PathLike,
    extra: Mapping[str, Any],
) -> tuple[Path, Path, dict[str, Any]]:
    """Make a temporary folder, which ``stack`` removes -> the final folder, the temporary one, and the header.

    Raises ValueError in all processes.
    """
    target, header = checkpoint.place_of(folder), checkpoint.checked_header(model, extra)
    made = ["", ""]
    if dist.get_rank() == 0:
        try:
            checkpoint.refuse_foreign(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            made[0] = str(stack.enter_context(atomic_io.new_folder(target)))
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
    return target, temporary, header


def _write_rest(model: nn.Module, temporary: Path, training: Mapping[str, Any]) -> None:
    """Write what only the first process has."""
    checkpoint.write_training(dict(training), temporary / TRAINING)
    if text := getattr(model, "tokenizer", ""):
        tokenization.write_files(temporary, text)


def _complete(temporary: Path, target: Path, header: dict[str, Any]) -> None:
    sealed_dir.seal(temporary, header)
    sealed_dir.swap(temporary, target)


def _unwritten(target: Path, error: Exception) -> str:
    return f"cannot write the checkpoint {target}: {checkpoint.first_line(error)}"


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
                tokenization.write_files(temporary, tokenizer)
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
    with checkpoint.opened(folder, TRAINING, INDEX) as (place, header, content):
        training, problem = checkpoint.parse_training(place, content(TRAINING)), ""
        index = None
        try:
            index = _index(place, content)
            shards.verify(place, header["files"], dist.get_rank(), dist.get_world_size())
            found = shards.shapes(index)
            wrong = [
                n for n in {**found, **tensors} if n not in found or n not in tensors or found[n][0] != tensors[n].shape
            ]
            if wrong:
                problem = f"{place} does not fit the model; {len(wrong)} tensors differ: {', '.join(wrong[:3])}"
        except ValueError as error:
            problem = str(error)
        _agreed(problem)
        assert index is not None
        shards.read_into(tensors, place, index)
    return training


def shapes(folder: str | Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of the tensors of a checkpoint in parts; empty for another checkpoint."""
    with checkpoint.opened(folder, optional=(INDEX,)) as (place, header, content):
        return shards.shapes(_index(place, content)) if INDEX in header["files"] else {}


def _index(place: Path, content: sealed_dir.Content) -> Metadata:
    """The index, whose digest is compared before it is unpickled. Raises ValueError."""
    found = content(INDEX)
    if found is None:
        raise ValueError(f"{place} is not a checkpoint in parts: it has no {INDEX}")
    return shards.parse_index(place / INDEX, found)
