"""Checkpoints: a folder with the weights, the config and, to go on training, the optimiser's state.

=====================  =============================================================================================
``model.safetensors``  the weights; of tied weights one copy
``config.json``        ``{"format": 1, "kind": "decoder", "config": {...}, "longspan": "0.1.0", ...}``
``training.pt``        only to resume training: plain values and tensors, read with ``weights_only=True``
=====================  =============================================================================================

A folder appears under its name complete or not at all: it is written beside it, synced to the disk and renamed. Where
a folder of that name exists, it steps aside under the name ``.NAME.old`` first; readers look there when they find
none, so that a process killed between the two renames costs nothing.
"""

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import Config, EncoderConfig
from .model import Decoder, Encoder
from .version import VERSION

FORMAT = 1
KINDS: dict[str, tuple[Any, Any]] = {"decoder": (Config, Decoder), "encoder": (EncoderConfig, Encoder)}
WEIGHTS, CONFIG, TRAINING = "model.safetensors", "config.json", "training.pt"


def save(
    folder: str | os.PathLike,
    model: Decoder | Encoder,
    *,
    training: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` as the checkpoint ``folder``; an older one there is replaced at once.

    ``training``: plain values and tensors that :func:`load_training` gives back. ``extra``: plain values, further
    entries of config.json.

    Raises ValueError for a folder that is no path, a model of another kind, an ``extra`` that hides an entry of the
    format, a folder that holds something other than a checkpoint, and a place that cannot be written.
    """
    from safetensors.torch import save_file

    if not isinstance(folder, str | os.PathLike):
        swapped = isinstance(folder, nn.Module) and isinstance(model, str | os.PathLike)
        hint = "; longspan.save(folder, model) takes the folder first, unlike torch.save" if swapped else ""
        raise ValueError(f"folder must be a path, not {type(folder).__name__}{hint}")
    folder = Path(os.path.abspath(folder))
    header = {"format": FORMAT, "kind": _kind(model), "config": model.config.to_dict(), "longspan": VERSION}
    taken = [name for name in extra or {} if name in header]
    if taken:
        raise ValueError(f"extra must not hold {taken[0]!r}, an entry that every checkpoint has: {', '.join(header)}")
    if folder.exists() and not (folder / CONFIG).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is no checkpoint (it has no {CONFIG}); it will not be replaced")
    try:
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(_weights(model), temporary / WEIGHTS, metadata={"format": "pt"})
        if training is not None:
            torch.save(dict(training), temporary / TRAINING)
        (temporary / CONFIG).write_text(json.dumps(header | dict(extra or {}), indent=2) + "\n", encoding="utf-8")
        # safetensors writes files that nobody but their owner may read.
        shutil.copymode(temporary / CONFIG, temporary / WEIGHTS)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        _swap(temporary, folder)
    except OSError as error:
        raise ValueError(f"cannot write the checkpoint {folder}: {error.strerror or error}") from error


def load(folder: str | Path) -> Any:
    """Build the model of a checkpoint, or of a training run's best one, with its weights, in eval mode on the CPU.

    It is a ``Decoder`` or an ``Encoder``, ``model.config`` is its config. The global random number generator is left
    alone.

    Raises ValueError for a folder that is missing or no checkpoint, another format or kind, a corrupt file, and weights
    that do not fit the config.
    """
    folder = resolve(folder)
    header = read_config(folder)
    config_class, model_class = KINDS[header["kind"]]
    try:
        with torch.random.fork_rng(devices=[]):
            model = model_class(config_class.from_dict(header["config"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} does not describe a {header['kind']}: {error}") from error
    load_weights(folder, model)
    return model.eval()


def load_training(folder: str | Path) -> dict[str, Any]:
    """What :func:`save` was given as ``training``; nothing but plain values and tensors is ever unpickled.

    Raises ValueError for a checkpoint without it and for a corrupt file.
    """
    path = _settled(Path(folder)) / TRAINING
    if not path.exists():
        raise ValueError(f"{folder} has no {TRAINING}: the model can be loaded, but its training cannot be resumed")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is corrupt or foreign: {_first_line(error)}") from error


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Copy the weights of a checkpoint into ``model``, which takes over their dtype where they agree on one.

    Raises ValueError for a missing or corrupt file, and for weights that do not fit; the message names the first few.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = _settled(Path(folder)) / WEIGHTS
    if not path.exists():
        raise ValueError(f"{folder} is no complete checkpoint: it has no {WEIGHTS}")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is corrupt: {_first_line(error)}") from error
    own, names = model.state_dict(), _first_names(model)
    weights |= {name: weights[first] for name, first in names.items() if name not in weights and first in weights}
    _compare(path, {k: tuple(v.shape) for k, v in weights.items()}, {k: tuple(v.shape) for k, v in own.items()})
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.load_state_dict(weights)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of a checkpoint's config.json: format, kind, config, longspan, and what ``extra`` held.

    Raises ValueError for a folder that is missing or no checkpoint, and for a format or kind that is not ours.
    """
    path = _settled(Path(folder)) / CONFIG
    if not path.parent.is_dir():
        raise ValueError(f"no checkpoint at {folder}: there is no such folder")
    if not path.exists():
        raise ValueError(f"{folder} is no checkpoint: it has no {CONFIG}")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
    if not isinstance(header, dict) or "format" not in header:
        raise ValueError(f"{path} belongs to another program: it names no format of a longspan checkpoint")
    if header["format"] != FORMAT:
        raise ValueError(f"{path} has format {header['format']}; this longspan {VERSION} reads format {FORMAT}")
    if header.get("kind") not in KINDS:
        raise ValueError(f"{path} has kind {header.get('kind')!r}; known: {', '.join(KINDS)}")
    if not isinstance(header.get("config"), dict):
        raise ValueError(f"{path} is corrupt: it has no config")
    return header


def resolve(folder: str | Path, prefer: str = "best") -> Path:
    """The checkpoint that ``folder`` means: itself, or of a training run the ``best`` or the ``last`` one.

    A run that has no pointer of the preferred name answers with the other one.

    Raises ValueError for a missing folder, one that is neither, and a pointer whose checkpoint is gone.
    """
    folder = _settled(Path(folder))
    if (folder / CONFIG).exists():
        return folder
    if not folder.is_dir():
        raise ValueError(f"no checkpoint at {folder}: there is no such folder")
    checkpoints = folder / "checkpoints"
    for name in dict.fromkeys((prefer, "best", "last")):
        pointer = checkpoints / name
        if pointer.is_file():
            target = _settled(checkpoints / Path(pointer.read_text(encoding="utf-8").strip()).name)
            if not (target / CONFIG).exists():
                raise ValueError(f"{pointer} points to {target.name!r}, and there is no such checkpoint beside it")
            return target
    raise ValueError(f"{folder} is no checkpoint (no {CONFIG}) and no training run (no checkpoints/last)")


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it has its old content or the new one, never a part of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _kind(model: nn.Module) -> str:
    for kind, (_, model_class) in KINDS.items():
        if type(model) is model_class:
            return kind
    raise ValueError(f"cannot save a {type(model).__name__}; known: {', '.join(c.__name__ for _, c in KINDS.values())}")


def _first_names(model: nn.Module) -> dict[str, str]:
    """Each name in the state dict and the first name of the same tensor, which is another one only for tied weights."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    state, names = model.state_dict(), _first_names(model)
    return {name: state[name].detach().contiguous() for name, first in names.items() if name == first}


def _compare(path: Path, found: dict[str, tuple], wanted: dict[str, tuple]) -> None:
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    shapes = [f"{n} {found[n]} instead of {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]]
    parts = [("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)]
    said = [f"{len(p)} {what}: {', '.join(p[:3])}{', ...' if len(p) > 3 else ''}" for what, p in parts if p]
    if said:
        raise ValueError(f"{path} does not fit the model; weights {'; '.join(said)}")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _settled(folder: Path) -> Path:
    """``folder``, or the older checkpoint of that name if a kill has left nothing but that."""
    folder = Path(os.path.abspath(folder))
    return _old(folder) if not folder.exists() and (_old(folder) / CONFIG).exists() else folder


def _swap(temporary: Path, folder: Path) -> None:
    """Rename ``temporary`` to ``folder``; at each moment a complete one is there, under its name or ``.NAME.old``."""
    old = _old(folder)
    if (folder / CONFIG).exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
        _sync(folder.parent)
    os.rename(temporary, folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
