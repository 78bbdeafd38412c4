"""Build an attention layer from a spec."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .._utils import model_memory, spec, typecheck
from .._utils.aliases import hinted
from ..modules.positions import MISSING, Positions, parse
from .base import REGISTRY, Attention, own_options
from .registry import list_mechanisms, mechanism


@functools.cache
def signature(cls: type[Attention]) -> inspect.Signature:
    """Return the options of a mechanism by keyword; a first option that is a nested spec may be positional."""
    found = list(own_options(cls).values())
    if found and found[0].annotation is spec.Spec:
        found[0] = found[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Signature(found)


@hinted
def build(
    text: str, dim: int, heads: int, *, causal: bool = True, layer: int = 0, depth: int = 1, positions: str = "none"
) -> Attention:
    """Build an attention layer from its spec, such as ``linear`` or ``local(window=64)``.

    >>> import longspan
    >>> attention = longspan.build("linear(feature_map='relu')", dim=64, heads=4)
    >>> attention.spec, attention.causal
    ("linear(feature_map='relu')", True)

    ``positions="rotary"`` sets the option ``rotary`` unless the spec sets it. With ``alibi`` and ``relative``,
    ``softmax`` becomes the mechanism of that name:

    >>> longspan.build("softmax", dim=64, heads=4, positions="relative(clamp=100)").spec
    'relative(clamp=100)'

    Args:
        text: the spec: the name of a mechanism, and options in parentheses.
        dim: the width of x.
        heads: the number of heads; it divides ``dim``.
        causal: whether a query sees only keys up to its own position.
        layer: the index of the layer in its stack, for mechanisms that depend on it.
        depth: the number of layers of the stack.
        positions: the positions of the model; see ``longspan.modules.positions``.

    Returns:
        The layer, with freshly initialized weights.

    Raises:
        ValueError: for an unknown mechanism or option, for invalid values, for positions that the mechanism does not
            support, and for weights that do not fit into the memory of this machine.
    """
    made = functools.partial(make, text, dim, heads, causal=causal, layer=layer, depth=depth, positions=positions)
    if model_memory.allocates_on_cpu():
        model_memory.check_fits_in_memory(
            model_memory.nbytes(model_memory.shapes(made)), f"weights of {typecheck.format_value(text)} with dim={dim}"
        )
    return made()


def make(text: str, dim: int, heads: int, *, causal: bool, layer: int, depth: int, positions: str) -> Attention:
    """``build`` without the check of memory."""
    placed = parse(positions)
    if ";" in str(text):
        raise ValueError(
            f"{typecheck.format_value(text)} is a stack, and build returns a single layer; build a stack with "
            f"Decoder(DecoderConfig(attention={typecheck.format_value(text)})), or with Stack(StackConfig(...)) for "
            "one without embeddings"
        )

    def maker(cls: type[Attention]) -> Callable[..., Attention]:
        takes = signature(cls)

        def made(*args: Any, **options: Any) -> Attention:
            kind, options = _placed(cls, placed, takes.bind(*args, **options).arguments)
            place: dict[str, Any] = {"causal": causal, "layer": layer, "depth": depth}
            taken = spec.options(kind.__init__)
            return kind(dim, heads, **options, **{name: value for name, value in place.items() if name in taken})

        made.__signature__ = takes  # pyright: ignore[reportFunctionMemberAccess] read by inspect.signature
        return made

    if name := spec.head(text):
        mechanism(name, "name")
    built = spec.parse(text, {name: maker(cls) for name, cls in REGISTRY.items()})
    if not isinstance(built, Attention):
        raise ValueError(f"{text!r} names no attention; known: {', '.join(sorted(REGISTRY))}")
    return built


def _placed(cls: type[Attention], placed: Positions, options: dict[str, Any]) -> tuple[type[Attention], dict[str, Any]]:
    """Return the class to build in a model with these positions, and its options.

    Raises ValueError if the mechanism does not support the positions.
    """
    given = placed.options()
    if placed.kind not in MISSING:
        return cls, options
    if placed.kind == "rotary":
        kind = cls if "rotary" in own_options(cls) else None
        # A spec that sets the base sets the layout, too.
        given = {} if "rotary" in options else given
    else:
        native = [one for one in REGISTRY.values() if one.native_positions == placed.kind]
        kind = next((one for one in native if cls.name in (one.name, one.replaces)), None)
    if kind is None:
        able = ", ".join(name for name in list_mechanisms() if _able(REGISTRY[name], placed.kind))
        raise ValueError(
            f"{cls.name} has no {placed.kind} positions: {MISSING[placed.kind]}. Mechanisms with {placed.kind} "
            f"positions: {able}. Every mechanism supports positions='none', 'sinusoidal' and "
            f"'learned' (--model.positions in a training)"
        )
    given |= options
    if odd := [name for name in given if name not in (known := own_options(kind))]:
        raise ValueError(
            f"{cls.name} with {placed.kind} positions is {kind.name}, which has no option {odd[0]!r}; "
            f"it has {', '.join(known) or 'no options'}"
        )
    return kind, given


def _able(cls: type[Attention], kind: str) -> bool:
    """Whether a mechanism, or the one that replaces it, has positions of this kind."""
    if kind == "rotary":
        return "rotary" in own_options(cls)
    return any(one.native_positions == kind and cls.name in (one.name, one.replaces) for one in REGISTRY.values())
