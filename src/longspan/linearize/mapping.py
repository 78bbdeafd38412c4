"""The student of a teacher: its config, and the weights that it begins with."""

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .._utils import model_memory, spec
from ..attention import Attention
from ..attention.base import own_options
from ..attention.build import make
from ..attention.softmax import Softmax
from ..attention.specs import options as options_of
from ..models import quantization
from ..models.config import DecoderConfig, EncoderConfig
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..modules.positions import Learned, Rotary, parse

Model = TypeVar("Model", bound=Decoder | Encoder)

KEPT = "softmax"
"""The spec of a layer that stays as it is"""
PROJECTIONS, NORMS = ("query", "key", "value", "out"), ("query_norm", "key_norm")
LIKE = ("rotary", "rotary_layout", "head_dim", "qk_norm")
"""Options that a layer takes from the teacher's"""


class Plan(NamedTuple):
    """The layers of a student."""

    specs: tuple[str, ...]
    """the complete spec of each layer"""
    converted: tuple[int, ...]
    """the layers that differ from the teacher's, from 0"""
    config: DecoderConfig | EncoderConfig
    """the student"""


def plan(teacher: Decoder | Encoder, attention: str, kept: Collection[int] = (), positions: int = 0) -> Plan:
    """Choose the layers of a student.

    Options that a spec leaves out take the sizes and the rotary positions of the teacher's layer, where the mechanism
    has such options. Other mechanisms have no rotary positions.

    Args:
        teacher: The teacher.
        attention: Specs that the teacher's softmax layers become, tiled over these; ``softmax`` keeps a layer. Other
            layers, such as ``local``, stay as they are.
        kept: Further softmax layers that stay, by their numbers in the teacher.
        positions: The number of learned positions of the new encoder; 0: that of the teacher.

    Raises:
        ValueError: The teacher or one of its layers cannot be mapped, a spec is wrong, or no layer is converted.
    """
    config, layers = teacher.config, teacher.stack.attentions()
    if config.stack != "plain":
        raise ValueError(f"the teacher has stack={config.stack!r}; only stacks of the kind 'plain' can be linearized")
    if quantization.described(teacher):
        raise ValueError("the teacher has weights of 8 or 4 bits; linearize the model before it is rounded")
    able = {i: layer for i, layer in enumerate(layers) if type(layer) is Softmax}
    if not able:
        raise ValueError(f"the teacher has no softmax layers that can become others: attention={config.attention!r}")
    given = spec.split(attention)
    if len(given) > len(able):
        raise ValueError(f"attention={attention!r} has {len(given)} specs, more than the {len(able)} softmax layers")
    if odd := [i for i in kept if i not in able]:
        raise ValueError(f"layer {odd[0]} cannot be kept; the softmax layers are {', '.join(map(str, able))}")
    wanted = {i: given[n % len(given)] for n, i in enumerate(able) if i not in kept}
    fitted = {i: _fitted(text, able[i], i) for i, text in wanted.items() if text != KEPT}
    specs = tuple(fitted.get(i, layer.spec) for i, layer in enumerate(layers))
    converted = tuple(i for i, text in fitted.items() if text != layers[i].spec)
    if not converted:
        raise ValueError(f"attention={attention!r} keeps all layers of the teacher; name another mechanism")
    kind, length = parse(config.positions), config.length
    if positions:
        if not isinstance(teacher, Encoder) or not isinstance(kind, Learned) or positions < length:
            raise ValueError(
                f"positions={positions} requires an encoder with learned positions, and at least as many as it has; "
                f"otherwise pass 0. This {type(teacher).__name__} has positions={config.positions!r}, length={length}"
            )
        length = positions
    # Rotary positions are options of the layers that have them.
    own = "none" if isinstance(kind, Rotary) else config.positions
    changed: dict[str, Any] = {"attention": spec.joined(specs), "positions": own, "length": length}
    return Plan(specs, converted, replace(config, **changed))


def student_of(teacher: Model, chosen: Plan) -> Model:
    """Build a student that begins with the teacher's weights.

    All weights outside of attention and those of kept layers are copied. Of a converted layer the projections query,
    key, value and out are copied, keys and values once for each query head that shares them; the rest is drawn. Learned
    positions beyond the teacher's table repeat it from the second one on, since the first belongs to the first token.

    Raises:
        ValueError: A layer cannot be mapped.
    """
    student: Any = type(teacher)(chosen.config)  # pyright: ignore[reportArgumentType] (the plan is the teacher's)
    for i in chosen.converted:
        layer = teacher.stack.attentions()[i]
        assert isinstance(layer, Softmax)
        carry_over(layer, student.stack.attentions()[i], f"layer {i}")
    own, place = student.state_dict(), tuple(f"stack.blocks.{i}.attention." for i in chosen.converted)
    with torch.no_grad():
        for name, weight in teacher.state_dict().items():
            if not name.startswith(place):
                own[name].copy_(weight if len(weight) == len(own[name]) else repeated(weight, len(own[name])))
    student.to(next(teacher.parameters()).dtype)
    student.tokenizer = teacher.tokenizer
    return student


@torch.no_grad()
def carry_over(teacher: Softmax, student: Attention, where: str) -> None:
    """Copy the projections of a softmax layer. Raises ValueError for shapes that do not fit, with ``where``."""
    for _, source, target in _projections(teacher, student, where):
        weight, bias = source.weight, source.bias
        if target.out_features != source.out_features:
            shared = teacher.heads // teacher.groups
            weight, bias = (_repeated(t, teacher.size, shared) for t in (weight, bias))
        target.weight.copy_(weight)
        if target.bias is not None:
            target.bias.copy_(bias)
    for name in NORMS:
        if teacher.qk_norm and getattr(student, name, None) is not None:
            getattr(student, name).load_state_dict(getattr(teacher, name).state_dict())


def left_out(teacher: Softmax, student: Attention) -> tuple[str, ...]:
    """Return what a softmax layer has and its student does not: biases that are not 0, norms, rotary positions."""
    found = _projections(teacher, student, "")
    lost = [f"{name} bias" for name, source, target in found if target.bias is None and bool(source.bias.any())]
    lost += [name for name in NORMS if teacher.qk_norm and getattr(student, name, None) is None]
    lost += ["rotary positions"] if teacher.rotary and not getattr(student, "rotary", 0.0) else []
    return tuple(lost)


def _projections(teacher: Softmax, student: Attention, where: str) -> list[tuple[str, Any, Any]]:
    """The projections of both: name, teacher's, student's. Raises ValueError."""
    width, found = teacher.heads * teacher.size, []
    for name in PROJECTIONS:
        source, target = getattr(teacher, name), getattr(student, name, None)
        if not isinstance(target, nn.Linear):
            raise ValueError(f"{where}: {student.name} has no {name} projection for the teacher's weights")
        shape, wanted = (target.out_features, target.in_features), (source.out_features, source.in_features)
        if shape != wanted and not (name in ("key", "value") and shape == (width, teacher.dim)):
            raise ValueError(
                f"{where}: the {name} projection of {student.spec} is {shape[0]} x {shape[1]}, and the teacher's, with "
                f"{teacher.heads} heads of {teacher.size} channels, is {wanted[0]} x {wanted[1]}"
            )
        found.append((name, source, target))
    return found


def _repeated(x: Tensor, size: int, times: int) -> Tensor:
    """(G*size,...) -> (G*times*size,...): each head is repeated."""
    return x.unflatten(0, (-1, size)).repeat_interleave(times, 0).flatten(0, 1)


def repeated(table: Tensor, length: int) -> Tensor:
    """Learned positions (M,dim) -> (length,dim): beyond M they repeat the table without its first row."""
    at = torch.arange(length)
    size = len(table)
    return table[torch.where(at < size, at, 1 + (at - size) % max(1, size - 1)).clamp(max=size - 1)]


def _fitted(text: str, layer: Softmax, index: int) -> str:
    """The spec with the options of the teacher's layer. Raises ValueError, also if the weights do not fit."""
    cls, given = options_of(text)
    like: dict[str, Any] = {name: getattr(layer, name) for name in LIKE}
    like |= dict.fromkeys(("expand_k", "expand_v"), layer.heads * layer.size / layer.dim)
    known = own_options(cls)
    fitted = {name: value for name, value in like.items() if name in known and name not in given}
    # A spec that sets the base sets the layout, too.
    if "rotary" in given:
        fitted.pop("rotary_layout", None)
    options = {name: value for name, value in (fitted | given).items() if value != known[name].default}
    found = cls.name + (f"({', '.join(f'{name}={value!r}' for name, value in options.items())})" if options else "")
    place = {"causal": layer.causal, "layer": 0, "depth": 1, "positions": "none"}
    made: Any = model_memory.shapes(functools.partial(make, found, layer.dim, layer.heads, **place))
    _projections(layer, made, f"layer {index}")
    return found
