"""Post-training quantization: models with weights in blocks of few bits."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._utils.spec import known
from .._utils.typecheck import format_value
from ..modules.quantized import Quantized, QuantizedEmbedding, QuantizedLinear
from ..ops.quantized import formats, pack
from ..ops.quantized.operands import ACTIVATIONS
from ..ops.quantized.packing import Packed, shapes
from .embedding import TiedHead

WEIGHTS = {"int8": "Q8_0", "int4": "Q4_0"}
"""The format of linear maps by the name of their weights; embeddings are Q8_0"""
METHOD = "longspan"
"""The name of quantized models in configs of transformers"""
PARTS = ("quants", "scales", "factors")
ENTRIES = {"format", "activations", "shares"}
SMALL = 64
"""Linear maps with fewer outputs, such as gates with one number per head, stay as they are"""


class Layer(NamedTuple):
    """What ``quantize`` did with a layer."""

    name: str
    """as in ``model.named_modules()``"""
    format: str
    """a key of ``longspan.ops.quantized.formats.FORMATS``; "" if the layer stays"""
    error: float
    """root of the mean square of the rounding, relative to that of the weight; 0 if the layer stays"""
    reason: str
    """why it stays; "" if it is quantized"""


def quantize(model: nn.Module, weights: str, *, activations: str = "int16", skip: Iterable[str] = ()) -> list[Layer]:
    """Round the weights of linear layers and embeddings to 8 or 4 bits, in place.

    Works on longspan's models and on any other module, such as models of transformers and fla. Every ``nn.Linear`` with
    at least 64 outputs becomes a ``QuantizedLinear``, and every ``nn.Embedding`` gets rows of 8 bits, which a tied
    output layer shares. Biases, norms, convolutions, decays and small maps stay. The decode engine reads such weights,
    and ``longspan.save`` keeps them. They are frozen: gradients pass through them to the layers before.

    Args:
        model: The model.
        weights: ``"int8"``, 8.5 bits per weight, or ``"int4"``, 4.5 bits.
        activations: ``"int16"``, ``"int8"`` or ``"float32"``, as in ``longspan.quantized_linear``.
        skip: Names of layers that stay, or patterns such as ``"*.out"``.

    Returns:
        One entry per linear layer and embedding, with the error of its weights, or the reason why it stays.

    Raises:
        ValueError: An argument is unknown, a name in ``skip`` matches no layer, weights are not finite, or there is no
            layer to quantize. The model does not change.

    Example:
        >>> import longspan
        >>> model = longspan.Decoder(longspan.DecoderConfig(dim=64, depth=1, heads=2, feedforward=128, vocab=5)).eval()
        >>> report = longspan.quantize(model, "int8")
        >>> [layer.name for layer in report if layer.format][:2]
        ['embedding.tokens', 'embedding.table']
    """
    form = WEIGHTS[known(weights, WEIGHTS, "kind of weights")]
    known(activations, ACTIVATIONS, "kind of activations")
    skip = [skip] if isinstance(skip, str) else list(skip)
    layers = {name: m for name, m in model.named_modules() if type(m) in (nn.Linear, nn.Embedding)}
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(f"skip={format_value(pattern)} matches no linear layer or embedding of the model")
    report: list[Layer] = []
    made: dict[int, tuple[Packed, float]] = {}  # by weight, which layers may share
    new: dict[str, Quantized] = {}
    # Embeddings first, since a tied output layer takes their format.
    for name, module in sorted(layers.items(), key=lambda item: type(item[1]) is nn.Linear):
        weight: Any = module.weight
        if reason := _why_not(name, module, skip, id(weight) in made):
            report.append(Layer(name, "", 0.0, reason))
            continue
        if id(weight) not in made:
            made[id(weight)] = _rounded(name, weight, "Q8_0" if type(module) is nn.Embedding else form)
        packed, error = made[id(weight)]
        if type(module) is nn.Linear:
            new[name] = QuantizedLinear(packed, module.bias, activations=activations, dtype=weight.dtype)
        else:
            new[name] = QuantizedEmbedding(packed, activations=activations, dtype=weight.dtype)
        report.append(Layer(name, packed.format, error, ""))
    if not new:
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in report[:3])
        raise ValueError(f"the model has no linear layer or embedding to quantize{f' ({reasons})' if reasons else ''}")
    _replace(model, new)
    _note(model)
    order = list(layers)
    return sorted(report, key=lambda layer: order.index(layer.name))


def _why_not(name: str, module: nn.Module, skip: list[str], shared: bool) -> str:
    weight: Any = module.weight
    if any(fnmatchcase(name, pattern) for pattern in skip):
        return "it is skipped"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "an embedding with max_norm or sparse gradients is trained, not run"
    if weight.is_meta:
        return "its weights are on the meta device"
    if weight.shape[1] % 32:
        return f"{weight.shape[1]} inputs are not a multiple of 32"
    if isinstance(module, nn.Linear) and len(weight) < SMALL and not shared:
        return f"it has {len(weight)} outputs, less than {SMALL}"
    return ""


def _rounded(name: str, weight: Tensor, form: str) -> tuple[Packed, float]:
    try:
        blocks = formats.quantize(weight, form)
    except ValueError as error:
        raise ValueError(f"{name} cannot be quantized: {error}") from error
    wide = weight.detach().float()
    error = (formats.dequantize(blocks) - wide).norm() / wide.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return pack(blocks), float(error)


def _replace(model: nn.Module, new: Mapping[str, Quantized]) -> None:
    """Put modules in the places of others, also where a tied head refers to them."""
    old = {id(model.get_submodule(name)): module for name, module in new.items()}
    for name, module in new.items():
        parent, _, last = name.rpartition(".")
        module.train(model.training)
        setattr(model.get_submodule(parent), last, module)
    for head in model.modules():
        if isinstance(head, TiedHead):
            head.tie(old.get(id(head.tokens), head.tokens))


def described(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the quantized layers of a model for the config of a checkpoint: by name, the arguments of ``restore``."""
    return {
        name: {"format": m.format, "activations": m.activations}
        for name, m in model.named_modules()
        if isinstance(m, QuantizedLinear | QuantizedEmbedding)
    }


def restore(model: nn.Module, layers: Any) -> None:
    """Replace the layers that ``described`` lists by quantized ones, whose weights are to be loaded.

    Raises:
        ValueError: The list is invalid or does not fit the model.
    """
    if not isinstance(layers, dict):
        raise ValueError(f"quantized must be a dict by layer, not {format_value(layers)}")
    found, new = dict(model.named_modules()), {}
    for name, entry in layers.items():
        module = found.get(name)
        if type(module) not in (nn.Linear, nn.Embedding):
            raise ValueError(
                f"quantized has {format_value(name)}, but the model has no linear layer or embedding of this name"
            )
        if not isinstance(entry, dict) or not {"format", "activations"} <= set(entry) <= ENTRIES:
            raise ValueError(f"quantized[{name!r}] must have format and activations, not {format_value(entry)}")
        if entry.get("shares", name) not in layers:
            raise ValueError(
                f"quantized[{name!r}] shares the weights of {format_value(entry['shares'])}, which is not quantized"
            )
        form = known(entry["format"], formats.FORMATS, "format of blocks")
        weight: Any = module.weight  # pyright: ignore[reportOptionalMemberAccess] (a layer, as compared above)
        outputs, inputs = weight.shape
        if inputs % formats.FORMATS[form].block:
            raise ValueError(f"quantized[{name!r}]: {inputs} inputs are no whole blocks of {form}")
        quants, scales, factors = (torch.zeros(shape, dtype=torch.uint8) for shape in shapes(form, outputs, inputs))
        packed = Packed(quants, scales, factors, form, outputs, inputs)
        options = {"activations": entry["activations"], "dtype": weight.dtype}
        if isinstance(module, nn.Linear):
            new[name] = QuantizedLinear(packed, module.bias, **options)
        else:
            new[name] = QuantizedEmbedding(packed, **options)
    _replace(model, new)
    _note(model)


def _note(model: Any) -> None:
    """Tell a model of transformers which layers are quantized, and which of these share weights, for its files."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return
    layers, tied = described(model), {}
    for name, source in model.all_tied_weights_keys.items():
        one, other = name.rpartition(".")[0], source.rpartition(".")[0]
        if one in layers and other in layers:
            model.get_submodule(one)._non_persistent_buffers_set |= set(PARTS)  # a file has them once
            layers[one]["shares"] = other
        elif not (one in layers or other in layers):
            tied[name] = source
    config.quantization_config = {"quant_method": METHOD, "layers": layers}
    model._tied_weights_keys = model.all_tied_weights_keys = tied


def share(model: nn.Module, layers: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the layers that share their weights those of the others, after these are loaded.

    Raises:
        ValueError: Their shapes differ.
    """
    for name, entry in layers.items():
        if source := entry.get("shares"):
            module, other = model.get_submodule(name), model.get_submodule(source)
            for part in PARTS:
                if getattr(module, part).shape != (shared := getattr(other, part)).shape:
                    raise ValueError(f"quantized[{name!r}] cannot share the weights of {source!r}, of another shape")
                setattr(module, part, shared)
