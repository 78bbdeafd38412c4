"""Models of transformers from GGUF files, and GGUF files from them."""

import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._utils.optional_deps import need
from ..._utils.spec import known
from ..._utils.typecheck import format_value
from ...modules.quantized import Quantized, QuantizedEmbedding, QuantizedLinear
from ...ops.quantized.formats import FORMATS, Blocks, dequantize, quantize
from .architectures import ARCHITECTURES, REQUIRED, Architecture, Entries, Row
from .blocks import Experts, How, Reordered, quantized
from .container import Container, Content, Place, write
from .tokenizer import write as write_tokenizer

# Formats of weights in files that are written, and their number in the metadata.
WEIGHTS = {"f32": 0, "f16": 1, "q8_0": 7, "q4_0": 2}
_SPECIAL = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def load(path: str | os.PathLike[str], *, activations: str = "int16") -> Any:
    """Load the model of a GGUF file.

    Weights in blocks stay in blocks, which products read as they are; others become float32. They are frozen.

    Args:
        path: The file, of an architecture in ``ARCHITECTURES``.
        activations: Those of products with blocks, as in ``longspan.quantized_linear``.

    Returns:
        A model of transformers under ``accelerate``, or of flash-linear-attention, in evaluation mode in float32.

    Raises:
        ImportError: transformers is not installed.
        ValueError: The file is damaged, of another architecture or version, or has tensors or types of tensors that
            are not supported. So does ``save_pretrained`` of the model.
    """
    need(f"the model in {path}", "transformers")
    from ..transformers import accelerate
    from ..transformers.loading import bounded, readable

    container = Container(path)
    with readable(container.path):
        architecture, config = described(container)
        # Each number of the file takes half a byte or more.
        sizes = {
            name: torch.empty(one.size, dtype=torch.uint8, device="meta") for name, one in container.tensors.items()
        }
        with bounded(None, sizes), torch.device("meta"):
            model = _model(config)
        _fill(model, container, architecture, activations)
        if architecture.kind != "rwkv7":
            accelerate(model)
    model.save_pretrained = _unsaved
    return model.eval()


def _unsaved(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "the weights stay in the blocks of the GGUF file, and are not saved in another format; copy the file"
    )


def described(container: Container) -> tuple[Architecture, Any]:
    """Return the architecture of a file, and the config of its model. Raises ValueError for what is not supported."""
    name = container.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"its architecture is {format_value(name)}; supported are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    entries = Entries(container.metadata, name, container.tensors)
    if (scaling := entries("rope.scaling.type", "none")) != "none":
        raise ValueError(f"rope scaling of the type {format_value(scaling)} is not supported")
    if entries("ssm.dt_b_c_rms", False):
        raise ValueError("its norms of B, C and dt (Falcon Mamba) are not supported")
    fields: dict[str, Any] = {}
    for one in architecture.entries:
        if one.field:
            value = entries(one.key, one.default)
            if type(value) is int and value < 1 and one.default is REQUIRED:
                raise ValueError(f"{name}.{one.key}={value} must be at least 1")
            fields[one.field] = one.read(value, entries)
    if "token_embd.weight" not in container.tensors:
        raise ValueError("it has no tensor token_embd.weight")
    for key, field in _SPECIAL.items():
        fields[field] = _token(container, key)
    # The end of a turn, where it is another token than that of a text.
    if (end := _token(container, "eot_token_id")) not in (None, fields["eos_token_id"]):
        fields["eos_token_id"] = [one for one in (fields["eos_token_id"], end) if one is not None]
    fields["vocab_size"] = container.tensors["token_embd.weight"].shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in container.tensors
    config = _config(architecture.kind, {**fields, **architecture.constants})
    if reason := architecture.check(config):
        raise ValueError(reason)
    return architecture, config


def _token(container: Container, key: str) -> int | None:
    found = container.metadata.get(f"tokenizer.ggml.{key}")
    rows = container.tensors["token_embd.weight"].shape[0]
    return found if isinstance(found, int) and 0 <= found < rows else None


def _config(kind: str, fields: Mapping[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind](**fields)
    from ..fla.models import supported

    return supported()[kind].config(**fields)


def _model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    family = getattr(config, "family", None)
    return AutoModelForCausalLM.from_config(config) if family is None else family.model(config)


@functools.cache
def _rows(architecture: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in ARCHITECTURES[architecture].rows:
        found.setdefault(row.ours, []).append(row)
    return found


def _parameters(model: Any, architecture: Architecture) -> Iterator[tuple[str, Tensor, Row, list[str]]]:
    """Yield each parameter: its name, itself, its row and its tensors in a file.

    Raises ValueError for a parameter without a row.
    """
    name = next(name for name, one in ARCHITECTURES.items() if one is architecture)
    tied = model.config.tie_word_embeddings
    for part in model.modules():
        if isinstance(part, Experts | Reordered):
            raise ValueError("a model with blocks of a file in another order cannot be written")
    blocks = ((f"{ours}.weight", m.dequantize()) for ours, m in model.named_modules() if isinstance(m, Quantized))
    for ours, parameter in itertools.chain(model.named_parameters(), blocks):
        if tied and ours == "lm_head.weight":
            continue
        layer = re.search(r"\.(\d+)\.", ours)
        pattern = ours if layer is None else ours.replace(layer[0], ".{}.", 1)
        rows = _rows(name).get(ours) or _rows(name).get(pattern, [])
        row = next((row for row in rows if row.when(model.config)), None)
        if row is None:
            raise ValueError(f"files of {name} have no place for {ours}")
        yield ours, parameter, row, [one.format(layer and layer[1]) for one in row.theirs.split()]


def _file_shapes(parameter: Tensor, row: Row, config: Any, count: int) -> list[tuple[int, ...]]:
    """Return the shapes of a parameter's tensors in a file."""
    shape = row.shape(tuple(parameter.shape), config)
    if row.slot is not None:
        return [shape]
    if count == 1:
        return [shape]
    parts = row.parts(config) if row.parts else [shape[-2] // count] * count
    return [(*shape[:-2], part, shape[-1]) for part in parts]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _fill(model: Any, container: Container, architecture: Architecture, activations: str) -> None:
    """Give a model on the meta device the weights of a file."""
    config, missing, odd = model.config, [], []
    found, used = [], set(architecture.copies)
    for ours, parameter, row, theirs in _parameters(model, architecture):
        used.update(theirs)
        absent = [one for one in theirs if one not in container.tensors]
        missing += absent
        if absent:
            continue
        for one, shape in zip(theirs, _file_shapes(parameter, row, config, len(theirs)), strict=True):
            given = container.tensors[one].shape
            wanted = shape if row.slot is None else (given[0], *shape)
            if _squeezed(given) != _squeezed(wanted) or (row.slot is not None and row.slot >= given[0]):
                odd.append(f"{one} {given} instead of {wanted}")
        found.append((ours, parameter, row, theirs))
    # Layers that predict further tokens.
    further = {
        one
        for one in container.tensors
        if (layer := re.match(r"blk\.(\d+)\.", one)) and int(layer[1]) >= config.num_hidden_layers
    }
    parts = {
        "missing": missing,
        "unexpected": [one for one in container.tensors if one not in used | further],
        "of another shape": odd,
    }
    if problems := [f"{len(names)} {what}: {', '.join(names[:3])}" for what, names in parts.items() if names]:
        raise ValueError(f"the tensors do not fit the model; {'; '.join(problems)}")
    how = How(activations, container.release)
    experts: dict[str, list[str]] = {}
    for ours, _, _, theirs in found:
        if (owner := ours.rpartition(".")[0]).endswith(".experts"):
            experts.setdefault(owner, []).extend(theirs)
    in_blocks = {name for name, one in container.tensors.items() if one.kind in FORMATS}
    experts = {owner: names for owner, names in experts.items() if in_blocks.issuperset(names)}
    for ours, parameter, row, theirs in found:
        owner, _, leaf = ours.rpartition(".")
        module = model.get_submodule(owner)
        if owner in experts:
            continue
        if leaf == "weight" and isinstance(module, nn.Linear | nn.Embedding) and in_blocks.issuperset(theirs):
            blocks: list[Any] = [container.read(one) for one in theirs]
            _put(model, owner, quantized(module, blocks, row, config, how))
        else:
            weight = _numbers(container, row, theirs, tuple(parameter.shape), config)
            setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
        container.release()
    for owner, names in experts.items():
        module, blocks = model.get_submodule(owner), [container.read(one) for one in names]
        _put(model, owner, Experts(blocks, module.num_experts, module.act_fn, how))
    for owner, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            _put(model, owner, type(module)(config))
    if config.tie_word_embeddings:
        words = model.get_input_embeddings()
        if isinstance(words, QuantizedEmbedding):
            model.lm_head = QuantizedLinear(words.packed, activations=activations)
        else:
            model.lm_head.weight = words.weight


def _put(model: Any, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _numbers(container: Container, row: Row, theirs: list[str], shape: tuple[int, ...], config: Any) -> Tensor:
    """Return a parameter in float32."""
    parts = [_dense(container.read(one), container.tensors[one]) for one in theirs]
    if row.slot is not None:
        parts = [part[row.slot] for part in parts]
    t = torch.cat(parts, -2) if len(parts) > 1 else parts[0]
    t = t.reshape(shape)
    if row.rows is not None:
        t = t[row.rows(config).argsort()]
    if row.columns is not None:
        t = t[:, row.columns(config).argsort()]
    return (t if row.value is None else row.value.read(t)).contiguous()


def _dense(t: Tensor | Blocks, place: Place) -> Tensor:
    return dequantize(t).view(place.shape) if isinstance(t, Blocks) else t.float()


def save(
    model: Any, path: str | os.PathLike[str], *, weights: str = "f32", tokenizer: str = "", template: str = ""
) -> None:
    """Write a model of transformers, or RWKV-7 of flash-linear-attention, as a GGUF file.

    Args:
        model: Of a type that ``load`` returns.
        path: The file; an existing one is replaced.
        weights: The format of the weights of linear layers, embeddings and experts: ``f32``, ``f16``, ``q8_0`` or
            ``q4_0``. Others, and rows whose size is not a multiple of 32, stay in float32.
        tokenizer: The content of its ``tokenizer.json``, or "".
        template: Its chat template, or "".

    Raises:
        OSError: The file cannot be written.
        ValueError: The model has another type, or something that the format cannot express.
    """
    known(weights, WEIGHTS, "format of weights")
    kinds = {one.kind: name for name, one in ARCHITECTURES.items()}
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in kinds:
        raise ValueError(f"models of the type {kind} cannot be written as GGUF; supported are {', '.join(kinds)}")
    name, config = kinds[kind], model.config
    architecture = ARCHITECTURES[name]
    if reason := architecture.check(config):
        raise ValueError(f"the model cannot be written as GGUF: {reason}")
    for field, value in architecture.constants.items():
        if field != "block_auto_adjust_ff_dim" and getattr(config, field) != value:
            raise ValueError(f"the model cannot be written as GGUF: {field}={getattr(config, field)} must be {value}")
    metadata: dict[str, Any] = {
        "general.architecture": name,
        "general.type": "model",
        "general.file_type": WEIGHTS[weights],
        "general.quantization_version": 2,
    }
    for one in architecture.entries:
        if one.written:
            metadata[f"{name}.{one.key}"] = getattr(config, one.field) if one.write is None else one.write(config)
    tokens = {f"tokenizer.ggml.{key}": getattr(config, field, None) for key, field in _SPECIAL.items()}
    tokens = {key: value[0] if isinstance(value, list) else value for key, value in tokens.items()}
    metadata |= {key: value for key, value in tokens.items() if value is not None}
    if tokenizer:
        metadata |= write_tokenizer(tokenizer, model.get_input_embeddings().num_embeddings, template)
    write(Path(os.path.abspath(path)), metadata, _contents(model, architecture, weights))


def _contents(model: Any, architecture: Architecture, weights: str) -> dict[str, Content]:
    found: dict[str, Content] = {}
    slots: dict[str, list[Tensor]] = {}
    for ours, parameter, row, theirs in _parameters(model, architecture):
        t = parameter.detach().cpu().float()
        t = t if row.value is None else row.value.write(t)
        if row.rows is not None:
            t = t[row.rows(model.config)]
        if row.columns is not None:
            t = t[:, row.columns(model.config)]
        if row.slot is not None:
            slots.setdefault(theirs[0], []).append(t)
            continue
        shapes = _file_shapes(parameter, row, model.config, len(theirs))
        t = t.reshape(row.shape(tuple(t.shape), model.config))
        parts = t.split([shape[-2] for shape in shapes], -2) if len(theirs) > 1 else [t]
        wide = _is_wide(model, ours)
        found |= {one: _content(part, weights if wide else "f32") for one, part in zip(theirs, parts, strict=True)}
    found |= {one: _content(torch.stack(parts), "f32") for one, parts in slots.items()}
    return found | {copy: found[one] for copy, one in architecture.copies.items()}


def _is_wide(model: Any, ours: str) -> bool:
    """Whether a parameter is a weight of a linear layer, an embedding or experts."""
    owner, _, leaf = ours.rpartition(".")
    module = model.get_submodule(owner)
    return "lora" not in ours and (
        (leaf == "weight" and isinstance(module, nn.Linear | nn.Embedding | Quantized)) or owner.endswith("experts")
    )


def _content(t: Tensor, weights: str) -> Content:
    shape, width = tuple(t.shape), t.shape[-1]
    if len(shape) == 1 or weights == "f32" or (weights != "f16" and width % 32):
        return Content(shape, t.contiguous())
    if weights == "f16":
        return Content(shape, t.half())
    return Content(shape, quantize(t.reshape(-1, width), weights.upper()))
