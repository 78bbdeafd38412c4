"""Loading of checkpoints without invented, dropped or converted weights, and without more weights than their files."""

import contextlib
import json
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from ...models import checkpoint
from . import quantizer  # noqa: F401 (registers how quantized models are loaded)

# Arguments of ``from_pretrained`` that say where the files are.
_HUB = ("cache_dir", "revision", "token", "local_files_only", "subfolder", "force_download")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_blocks", "depth")
# How many times the tensors and the bytes of its files a model may have: weights that are shared, split or packed.
_TIMES, _MORE_TENSORS, _MORE_NUMBERS = 8, 64, 1 << 20


class StrictLoading(PreTrainedModel):
    """A model of transformers whose ``from_pretrained`` requires every weight, and no other."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model as transformers does, but raise an error where transformers would invent or convert weights.

        Args:
            args: arguments of ``PreTrainedModel.from_pretrained``.
            output_loading_info: return the model and a dict with details.
            kwargs: keyword arguments of ``PreTrainedModel.from_pretrained``.

        Raises:
            ValueError: the config or the files are damaged; weights are missing, unexpected, NaN, or of another shape
                or kind of numbers than the model's; the config's model is far larger than the files.
        """
        # transformers would raise an error that does not name the weights.
        kwargs.setdefault("ignore_mismatched_sizes", True)
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        with readable(source):
            with bounded(folder_of(source, kwargs), kwargs.get("state_dict")):
                found: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
            model, info = found
            odd = {
                what: sorted(str(one) for one in info.get(key) or ())
                for what, key in (
                    ("missing", "missing_keys"),
                    ("unexpected", "unexpected_keys"),
                    ("of another shape", "mismatched_keys"),
                )
            }
            problems = [f"{len(names)} {what}: {', '.join(names[:3])}" for what, names in odd.items() if names]
            if problems:
                raise ValueError(f"the weights do not fit the model; {'; '.join(problems)}")
            checkpoint.refuse_nan("the model", {n: t for n, t in model.state_dict().items() if not t.is_meta})
        model._loaded()
        return (model, info) if output_loading_info else model

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any) -> Any:
        """Load weights after a check: transformers silently converts integers, bools and complex numbers to reals."""
        if not load_config.is_quantized:
            _check_kinds(model.state_dict(), state_dict, checkpoint_files or ())
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args)

    def _loaded(self) -> None:
        """Run after the weights are loaded."""

    def _get_name(self) -> str:
        """Return the name of a class that ``shift_smoothed_labels`` knows, also for a subclass of it."""
        # fully_shard (FSDP2) makes a subclass.
        known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        return next((cls.__name__ for cls in type(self).__mro__ if cls.__name__ in known), super()._get_name())


def shift_smoothed_labels(model_type: str, name: str) -> None:
    """Make Trainer shift the labels of the class ``name`` for ``label_smoothing_factor``.

    Trainer knows causal models by the names in a table. For other classes, it would train each token on itself.
    """
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(model_type, name)


def read_config(source: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint's ``config.json``.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
        options: keyword arguments of ``from_pretrained``.

    Raises:
        ValueError: the folder has no such file, or it is not a JSON object.
    """
    folder = folder_of(source, options)
    assert folder is not None
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{os.fspath(source)} has no config.json")
    return _json(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(found).__name__}")
    return found


def folder_of(source: Any, options: Mapping[str, Any]) -> Path | None:
    """Return the folder of a checkpoint, for a name on the Hub that of its local copy; None without a source."""
    if source is None:
        return None
    if Path(source).is_dir():
        return Path(source, options.get("subfolder") or "")
    found = cached_file(os.fspath(source), "config.json", **{k: v for k, v in options.items() if k in _HUB})
    assert found is not None
    return Path(found).parent


def _number(found: dict[str, Any]) -> Any:
    """Return infinities as numbers, which transformers writes as ``{"__float__": "Infinity"}``."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


@contextlib.contextmanager
def readable(source: Any) -> Iterator[None]:
    """Turn errors about a damaged checkpoint into a ValueError of one line that names it."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        known, message = isinstance(error, ValueError | OSError), str(error)
        if known and "\n" not in message and (source is None or os.fspath(source) in message):
            raise
        message = " ".join(message.split())[:500]
        what = message if known else f"{type(error).__name__}: {message}"
        raise ValueError(f"cannot load {'the weights' if source is None else source}: {what}") from error


@contextlib.contextmanager
def bounded(folder: Path | None, given: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Raise ValueError where a model is built that is far larger than the files of its checkpoint.

    Args:
        folder: the checkpoint's folder, whose files may arrive before the model is built; or None.
        given: weights instead of files.
    """
    if folder is None and given is None:
        yield
        return
    thread, tensors, numbers = threading.get_ident(), 0, 0
    room: tuple[int, int] | None = None

    def count(module: Any, name: str, parameter: Any) -> None:
        nonlocal tensors, numbers, room
        if threading.get_ident() != thread or parameter is None:
            return
        room = _room(folder, given) if room is None else room
        tensors, numbers = tensors + 1, numbers + parameter.numel()
        if room != (0, 0) and (
            tensors > _TIMES * room[0] + _MORE_TENSORS or numbers > _TIMES * room[1] + _MORE_NUMBERS
        ):
            raise ValueError(
                f"{folder or 'the weights'} cannot fill the model of the config: there are {room[0]:,} tensors of "
                f"{room[1]:,} bytes, and the model has more than {tensors - 1:,} tensors and {numbers - 1:,} numbers"
            )

    if folder is not None and (folder / "config.json").is_file():
        check_files(folder)
    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def check_files(folder: Path) -> None:
    """Raise ValueError if an index of a folder is damaged, or ``config.json`` has more layers than its files tensors.

    Classes of configs make lists with an entry for each layer, so it comes before them.
    """
    for index in sorted(folder.glob("*.index.json")):
        places = _json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ValueError(f"{index} must have an object weight_map, with the name of a file for each tensor")
    config = read_config(folder, {})
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in _LAYERS:
            layers = part.get(name)
            if isinstance(layers, int) and layers > 1000 and (count := _room(folder, None)[0]) and layers > count:
                raise ValueError(f"{folder}: {name}={layers:,} of config.json, but its files have {count:,} tensors")


def _room(folder: Path | None, given: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the number of tensors and their bytes; (0, 0) if there are none."""
    if folder is not None and given is None:
        # Not the files of a trainer, such as training_args.bin.
        files = [file for file in sorted(folder.glob("*")) if file.name.startswith(("model", "pytorch_model"))]
        given = headers([str(file) for file in files if file.suffix in (".safetensors", ".bin")])
    tensors = [t for t in (given or {}).values() if isinstance(t, Tensor)]
    return len(tensors), sum(t.nbytes for t in tensors)


def headers(files: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of files by name, on the meta device.

    Raises:
        ValueError: a file is damaged.
    """
    found = {}
    for file in files:
        try:
            found |= load_state_dict(file, map_location="meta")
        # transformers raises ValueError for complex numbers.
        except (SafetensorError, OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"cannot load {file}: {' '.join(str(error).split())}") from error
    return {name: t for name, t in found.items() if isinstance(t, Tensor)}


def _check_kinds(wanted: Mapping[str, Tensor], given: Mapping[str, Any] | None, files: Sequence[str]) -> None:
    """Raise ValueError for weights whose kind of numbers differs from the model's, given or in files."""
    found = {name: t.dtype for name, t in (given or {}).items() if isinstance(t, Tensor)}
    found |= {name: t.dtype for name, t in headers(files).items()}
    odd = [
        f"{name} {dtype} instead of {wanted[name].dtype}"
        for name, dtype in found.items()
        if name in wanted and not checkpoint.same_kind(dtype, wanted[name].dtype)
    ]
    if odd:
        more = ", ..." if len(odd) > 3 else ""
        raise ValueError(f"the weights do not fit the model; {len(odd)} of another kind: {', '.join(odd[:3])}{more}")
