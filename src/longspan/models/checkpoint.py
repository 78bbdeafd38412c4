"""Checkpoints: a folder with the weights, the config and, for resuming, the optimizer's state.

=====================  =============================================================================================
``model.safetensors``  the weights; tied weights are stored once
``training.pt``        only for resuming: plain values and tensors, read with ``weights_only=True``
``tokenizer.json``     the tokenizer of a decoder that has one, in the format of the library ``tokenizers``; with
                       ``tokenizer_config.json``, for ``AutoTokenizer`` of transformers
``config.json``        ``{"format": 2, "kind": "decoder", "config": {...}, "longspan": "0.1.0", "files": {...}, ...}``
=====================  =============================================================================================

Saving is atomic: a folder is complete or not there, also if a process is killed or several processes save to it.
Changed files and files of another checkpoint are detected: see ``sealed_dir``.
"""

import contextlib
import io
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch import distributed as dist

from .._utils import atomic_io, sealed_dir
from .._utils.model_memory import Unfilled
from .._utils.sealed_dir import CONFIG
from .._utils.spec import known
from .._utils.typecheck import format_value
from .._utils.version import VERSION
from ..data import tokenization
from . import quantization
from .config import DecoderConfig, EncoderConfig, Seq2SeqConfig, TranscriberConfig
from .decoder import Decoder
from .encoder import Encoder
from .seq2seq import Seq2Seq
from .stacks import estimate_bytes
from .transcriber import Transcriber

MODEL_CLASSES: dict[str, tuple[Any, Any]] = {
    "decoder": (DecoderConfig, Decoder),
    "encoder": (EncoderConfig, Encoder),
    "seq2seq": (Seq2SeqConfig, Seq2Seq),
    "transcriber": (TranscriberConfig, Transcriber),
}
WEIGHTS, TRAINING, TOKENIZER = "model.safetensors", "training.pt", "tokenizer.json"
# The index of the tensors of a checkpoint in parts.
INDEX = ".metadata"
# The kind of a checkpoint of a fine-tuning; longspan.finetune adds its class when it is loaded.
CHANGES = "fine-tuning"
RESULTS = "its run directory has the result, in adapter/, adapter.safetensors or model/"
# The entry of config.json that has the sha256 of the data of a training.
DATA = "data_sha256"
# The entry of config.json that lists the layers with weights of few bits.
QUANTIZED = "quantized"


def save(
    model: Decoder | Encoder | Seq2Seq | Transcriber,
    folder: str | os.PathLike,
    *,
    training: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as a checkpoint, atomically.

    Args:
        model: The model.
        folder: The folder of the checkpoint; an older checkpoint there is replaced.
        training: Plain values and tensors that :func:`load_training` returns.
        extra: Plain values, additional entries of config.json.

    Raises:
        ValueError: If the folder is not a path, or contains something other than a checkpoint; if the model is of
            another type or has NaN weights; if ``extra`` has an entry of the format or is not plain; if the folder
            cannot be written. An older checkpoint then stays.

    Example:
        >>> import tempfile, longspan
        >>> model = longspan.Decoder(longspan.DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     longspan.save(model, f"{folder}/model")
        ...     again = longspan.load(f"{folder}/model")
        >>> again.config == model.config
        True
    """
    if not isinstance(folder, str | os.PathLike):
        swapped = isinstance(folder, nn.Module) and isinstance(model, str | os.PathLike)
        hint = "; longspan.save(model, folder) takes the model first, as torch.save does" if swapped else ""
        raise ValueError(f"folder must be a path, not {type(folder).__name__}{hint}")
    folder = place_of(folder)
    header = checked_header(model, extra)
    # Of a sharded model all processes gather the weights, and the first one writes.
    weights = _weights(model)
    sharded = is_sharded(model)
    try:
        if not (sharded and dist.get_rank()):
            _write(weights, folder, training, header, getattr(model, "tokenizer", ""))
    finally:
        if sharded:
            dist.barrier()


def _write(
    weights: dict[str, Tensor], folder: Path, training: Mapping[str, Any] | None, header: dict, tokenizer: str
) -> None:
    """Write a checkpoint of these weights. Raises ValueError as ``save`` does."""
    refuse_nan("the model", weights)
    try:
        refuse_foreign(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_io.new_folder(folder) as temporary:
            safetensors.torch.save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
            if training is not None:
                write_training(dict(training), temporary / TRAINING)
            if tokenizer:
                tokenization.write_files(temporary, tokenizer)
            sealed_dir.seal(temporary, header)
            sealed_dir.swap(temporary, folder)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(f"cannot write the checkpoint {folder}: {reason}") from error


def checked_header(model: Any, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json for a model. Raises ValueError for an entry of the format in ``extra``."""
    header = {"kind": _kind(model), "config": model.config.to_dict(), "longspan": VERSION}
    entries = ("format", *header, QUANTIZED, "files", "sha256")
    if layers := quantization.described(model):
        header[QUANTIZED] = layers
    if taken := [name for name in extra or {} if name in entries]:
        raise ValueError(f"extra must not contain {taken[0]!r}; every checkpoint has the entries {', '.join(entries)}")
    return header | dict(extra or {})


def load(folder: str | Path) -> Any:
    """Load the model of a checkpoint or a run; arguments and errors as in ``longspan.load``."""
    folder, header, weights, tokenizer = read(folder)
    if header["kind"] == CHANGES:
        raise ValueError(f"{folder} is of a fine-tuning: it has what changes, not a model; {RESULTS}")
    config_class, model_class = MODEL_CLASSES[header["kind"]]
    try:
        config = config_class.from_dict(header["config"])
        _look(weights, estimate_bytes(model_class, config))
        with torch.random.fork_rng(devices=[]), Unfilled(everywhere=True):
            model = model_class(config)
        quantization.restore(model, header.get(QUANTIZED, {}))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} does not describe a {header['kind']}: {error}") from error
    _fill(model, weights, folder / WEIGHTS)
    if tokenizer:
        model.tokenizer = tokenizer
    return model.eval()


def load_training(folder: str | Path) -> dict[str, Any]:
    """Load the ``training`` argument of :func:`save`; only plain values and tensors are unpickled.

    Raises:
        ValueError: For a checkpoint without it, and a file that was changed or damaged.
    """
    with opened(folder, TRAINING) as (folder, _, content):
        return parse_training(folder, content(TRAINING))


def restore(folder: str | Path, model: nn.Module) -> dict[str, Any]:
    """Copy the weights of a checkpoint into ``model``, whose dtype becomes that of the weights.

    Returns:
        What :func:`load_training` returns, of the same save.

    Raises:
        ValueError: As :func:`load` and :func:`load_training` do.
    """
    with opened(folder, TRAINING, WEIGHTS) as (folder, _, content):
        training = parse_training(folder, content(TRAINING))
        _fill(model, _tensors(folder, content(WEIGHTS)), folder / WEIGHTS)
    return training


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read config.json of a checkpoint: format, kind, config, longspan, files, sha256 and the entries of ``extra``.

    Raises:
        ValueError: If the folder is missing or not a checkpoint, has another format or kind, or if config.json was
            changed or damaged.
    """
    with opened(folder) as (_, header, _):
        return header


def resolve(folder: str | Path, prefer: str = "best") -> Path:
    """Return the path of a checkpoint: ``folder`` itself, or the ``best`` or ``last`` checkpoint of a training run.

    The path is a name. After a kill, the files may be in another folder; :func:`load` and the others find them.

    Args:
        folder: A checkpoint, or the folder of a training run.
        prefer: ``best`` or ``last``. If the run lacks this one, the other one is returned.

    Raises:
        ValueError: If the folder is missing or neither of both, or if its pointer is damaged or points nowhere.
    """
    place = place_of(folder)
    with atomic_io.reading(place):
        if sealed_dir.there(place):
            return place
        if not place.is_dir():
            raise ValueError(f"no checkpoint at {place}: there is no such folder")
        for name in dict.fromkeys((prefer, "best", "last")):
            pointer = place / "checkpoints" / name
            if pointer.is_file():
                return _target(pointer)
    raise ValueError(f"{place} is neither a checkpoint (no {CONFIG}) nor a training run (no checkpoints/last)")


def tidy(folder: str | Path) -> None:
    """Remove the leftovers of killed saves next to the checkpoint ``folder``; files that are being written stay."""
    sealed_dir.tidy(place_of(folder))


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically, without following links.

    Raises:
        OSError: If the file cannot be written; its old content then stays.
    """
    atomic_io.write(path, text.encode())


def place_of(folder: str | os.PathLike) -> Path:
    return atomic_io.check(Path(os.path.abspath(folder)))


def _look(weights: Mapping[str, Tensor], size: int) -> None:
    """Raise ValueError if a model of ``size`` bytes cannot have these weights, before it is built."""
    found = sum(t.nbytes for t in weights.values())
    # One byte per number is an eighth of float64.
    if size > 8 * found + (1 << 20):
        raise ValueError(f"its weights would take {size:,} bytes, but {WEIGHTS} has {found:,}")


def kind_of(config: Any) -> str:
    """Return the kind of model that a config describes. Raises ValueError for any other type."""
    for kind, (config_class, _) in MODEL_CLASSES.items():
        if type(config) is config_class:
            return kind
    names = ", ".join(config_class.__name__ for config_class, _ in MODEL_CLASSES.values())
    raise ValueError(f"{type(config).__name__} is not the config of a model; known: {names}")


def config_of(fields: Mapping[str, Any]) -> Any:
    """Build the config of a recipe's ``model`` entry: its fields and ``kind``, by default ``decoder``.

    Raises:
        ValueError: For an unknown kind or field, and values of another type or out of range.
    """
    values = dict(fields)
    return MODEL_CLASSES[known(values.pop("kind", "decoder"), MODEL_CLASSES, "kind of model")][0].from_dict(values)


def model_class(model: nn.Module) -> type[nn.Module]:
    """The class of a model, also of one that ``fully_shard`` has given a class of its own."""
    cls = type(model)
    # Without torch.distributed.fsdp no module can be sharded, and importing it takes long.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return cls.__bases__[1] if fsdp and fsdp.FSDPModule in cls.__bases__ else cls


def _kind(model: nn.Module) -> str:
    for kind, (_, cls) in MODEL_CLASSES.items():
        if model_class(model) is cls:
            return kind
    raise ValueError(
        f"cannot save a {type(model).__name__}; known: {', '.join(c.__name__ for _, c in MODEL_CLASSES.values())}"
    )


def first_names(model: nn.Module) -> dict[str, str]:
    """Each name in the state dict with the first name of the same tensor; they differ only for tied weights."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    state, names = model.state_dict(), first_names(model)
    own = {name: state[name].detach() for name, first in names.items() if name == first}
    return {name: (t.full_tensor() if _is_dtensor(t) else t).contiguous() for name, t in own.items()}


def is_sharded(model: nn.Module) -> bool:
    """Whether each process has a part of the weights only."""
    return any(map(_is_dtensor, model.parameters()))


def _is_dtensor(tensor: Tensor) -> bool:
    # Without the module no tensor can be one, and importing it takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_foreign(folder: Path) -> None:
    """Raise ValueError if the folder exists, is not empty and is not a checkpoint."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if not folder.exists():
            raise
        names = [folder.name]
    if names and CONFIG not in names:
        raise ValueError(f"{folder} exists and is not a checkpoint (it has no {CONFIG}); it will not be replaced")


def refuse_nan(owner: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError for NaN weights."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and (count := int(tensor.isnan().sum())):
            raise ValueError(f"{owner} has NaN weights: {count} of {tensor.numel()} in {name}")


def write_training(training: dict[str, Any], path: Path) -> None:
    with open(path, "xb") as file:
        try:
            torch.save(training, file)
        except RuntimeError as error:
            # torch's writer raises its own error in place of the system's.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextlib.contextmanager
def opened(
    folder: str | Path, *names: str, optional: tuple[str, ...] = ()
) -> Iterator[tuple[Path, dict[str, Any], sealed_dir.Content]]:
    with sealed_dir.opened(place_of(folder), *names, optional=optional) as (folder, header, content):
        if not isinstance(header.get("kind"), str) or header["kind"] not in (*MODEL_CLASSES, CHANGES):
            raise ValueError(
                f"{folder / CONFIG} has kind {format_value(header.get('kind'))}; known: {', '.join(MODEL_CLASSES)}"
            )
        if not isinstance(header.get("config"), dict):
            raise ValueError(f"{folder / CONFIG} is corrupt: it has no config")
        yield folder, header, content


def parse_training(folder: Path, content: bytes | None) -> dict[str, Any]:
    if content is None:
        raise ValueError(f"{folder} has no {TRAINING}: the model can be loaded, but its training cannot be resumed")
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / TRAINING} is corrupt or foreign: {first_line(error)}") from error


def _tensors(folder: Path, content: bytes | None) -> dict[str, Tensor]:
    if content is None:
        raise ValueError(f"{folder} is not a complete checkpoint: it has no {WEIGHTS}")
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"{folder / WEIGHTS} is corrupt: {first_line(error)}") from error


def _fill(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    own, names = model.state_dict(), first_names(model)
    weights |= {name: weights[first] for name, first in names.items() if name not in weights and first in weights}
    _compare(path, weights, own)
    refuse_nan(path, weights)
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights.pop(name))  # each is freed when it is copied


def _compare(path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    both = [name for name in wanted if name in found]
    parts = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
            for name in both
            if found[name].shape != wanted[name].shape
        ],
        # Precisions may differ, but integers cannot replace floating-point numbers.
        "of another kind": [
            f"{name} {found[name].dtype} instead of {wanted[name].dtype}"
            for name in both
            if not same_kind(found[name].dtype, wanted[name].dtype)
        ],
    }
    problems = [f"{len(p)} {what}: {', '.join(p[:3])}{', ...' if len(p) > 3 else ''}" for what, p in parts.items() if p]
    if problems:
        raise ValueError(f"{path} does not fit the model; weights {'; '.join(problems)}")


def same_kind(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether weights of one dtype may replace those of another: both floating-point, or the same dtype."""
    return found == wanted or (found.is_floating_point and wanted.is_floating_point)


def read(folder: str | Path) -> tuple[Path, dict[str, Any], dict[str, Tensor], str]:
    """Read the path, the config.json, the weights and the tokenizer ("": none) of a checkpoint, all of one save.

    Raises ValueError.
    """
    name = resolve(folder)
    while True:
        try:
            with opened(name, WEIGHTS, optional=(TOKENIZER, INDEX)) as (at, header, content):
                tokenizer = (content(TOKENIZER) or b"").decode()
                if WEIGHTS not in header["files"] and (index := content(INDEX)) is not None:
                    # Imported for a checkpoint in parts only, since importing it takes long.
                    from . import shards

                    shards.verify(at, header["files"])
                    return at, header, shards.read(at, shards.parse_index(at / INDEX, index), "model."), tokenizer
                return at, header, _tensors(at, content(WEIGHTS)), tokenizer
        except ValueError:
            # A running training removes checkpoints that its pointers no longer name.
            before, name = name, resolve(folder)
            if name == before:
                raise


def _target(pointer: Path) -> Path:
    """Follow a pointer to the checkpoint next to it. Raises ValueError if it is damaged or points nowhere."""
    name = _pointed(pointer)
    while not sealed_dir.there(target := pointer.with_name(name)):
        before, name = name, _pointed(pointer)
        if name == before:
            raise ValueError(f"{pointer} points to {name!r}, but there is no such checkpoint in {pointer.parent}")
    return target


def _pointed(pointer: Path) -> str:
    content = atomic_io.read(pointer)
    try:
        name = Path(content.decode().strip()).name
    except UnicodeDecodeError:
        name = ""
    if name in ("", "..") or "\0" in name:
        raise ValueError(f"{pointer} is damaged: it does not contain the name of a checkpoint, but {content[:40]!r}")
    return name


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
