"""Tensors of checkpoints in parts, one file for each process, in the format of ``torch.distributed.checkpoint``.

The files lie in a checkpoint folder, whose config.json has their digests. Only tensors are stored, and only classes
that describe them are unpickled. Names begin with ``model.``, ``objective.`` or ``optimizer.``.
"""

import contextlib
import hashlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

# The classes and functions that describe tensors; torch itself has dtypes, too.
DESCRIBING = {
    "torch.distributed.checkpoint.metadata": (
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
}


class _Unpickler(pickle.Unpickler):
    """Unpickles descriptions of tensors only, since a pickle could otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or dtype of this name."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in DESCRIBING.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which does not describe a tensor")


def parse_index(path: Path, content: bytes) -> Metadata:
    """The shapes, dtypes and places of all tensors, from the index, whose digest the caller has compared.

    Raises ValueError for an index that is corrupt or foreign; code in it does not run.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        shapes(found)
    # A damaged pickle can raise any error.
    except Exception as error:
        raise ValueError(f"{path} is corrupt or foreign: {error}") from error
    return found


class Reader(FileSystemReader):
    """Reads the files of a checkpoint by an index that is parsed already."""

    def __init__(self, folder: Path, index: Metadata):
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The shapes, dtypes and places of all tensors."""
        return self.index


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors, sharded or not, into a folder; all processes call this together."""
    with _plain_errors("cannot write", folder):
        save(dict(tensors), storage_writer=FileSystemWriter(folder))


def write_async(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> Callable[[], None]:
    """Copy tensors to CPU memory, and write the copies in a thread; all processes call this together.

    ``group``: all processes, on the CPU. The result waits for this process's thread, and raises its error. In the
    first process it returns after all processes have written their files.
    """
    # A future: the writer has copied the tensors when the call returns.
    written: Any = async_save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=group)

    def wait() -> None:
        with _plain_errors("cannot write", folder):
            written.result()

    return wait


def shapes(index: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor."""
    found = index.state_dict_metadata.items()
    return {name: (t.size, t.properties.dtype) for name, t in found if isinstance(t, TensorStorageMetadata)}


def read_into(tensors: Mapping[str, Tensor], folder: Path, index: Metadata) -> None:
    """Fill tensors, sharded or not, with those of the same names; all processes call this together."""
    with _plain_errors("cannot read", folder):
        load(dict(tensors), storage_reader=Reader(folder, index))


def read(folder: Path, index: Metadata, prefix: str) -> dict[str, Tensor]:
    """Read the whole tensors whose names begin with ``prefix``, in one process; the prefix is removed."""
    found = {name: it for name, it in shapes(index).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in found.items()}
    if tensors:
        with warnings.catch_warnings(), _plain_errors("cannot read", folder):
            # One process alone, as meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(tensors, storage_reader=Reader(folder, index), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@contextlib.contextmanager
def _plain_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn the error that DCP raises in all processes, a BaseException, into a ValueError with its first cause."""
    try:
        yield
    except CheckpointException as error:
        cause = next((one[0] for one in error.failures.values()), error)
        raise ValueError(f"{what} {folder}: {cause}") from error


def verify(folder: Path, files: Mapping[str, Any], rank: int = 0, world: int = 1) -> None:
    """Compare every ``world``-th of the parts with its digest. Raises ValueError for one that was changed."""
    for name in [name for name in sorted(files) if name.endswith(".distcp")][rank::world]:
        path = folder / name
        try:
            with path.open("rb") as file:
                found = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
        if found != files[name]:
            raise ValueError(
                f"{path} was changed or damaged since it was written: it is {found}, and config.json records "
                f"{files[name]}; restore it from a copy, or take another checkpoint"
            )
