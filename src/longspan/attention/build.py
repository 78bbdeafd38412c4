"""Build an attention from a spec."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .._utils import model_memory, spec, typecheck
from .._utils.aliases import hinted
from ..modules.positions import MISSING, Positions, parse
from .base import REGISTRY, Attention, own_options
from .registry import list_mechanisms, mechanism


def signature(cls: type[Attention]) -> inspect.Signature:
    """The options of a mechanism by keyword, and its first by position too where that is a nested spec."""
    found = list(own_options(cls).values())
    if found and found[0].annotation is spec.Spec:
        found[0] = found[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Signature(found)


@hinted
def build(
    text: str, dim: int, heads: int, *, causal: bool = True, layer: int = 0, depth: int = 1, positions: str = "none"
) -> Attention:
    """Build an attention from its spec, such as ``linear`` or ``local(window=64)``.

    >>> import longspan
    >>> attention = longspan.build("linear(feature_map='relu')", dim=64, heads=4)
    >>> attention.spec, attention.causal
    ("linear(feature_map='relu')", True)

    ``dim`` is the width of x, ``heads`` divides it; ``layer`` of ``depth`` is its place in a stack, for mechanisms that
    depend on it; ``positions`` are those of a model, see ``longspan.modules.positions``: ``rotary`` where the spec
    itself gives none, and with ``alibi`` and ``relative`` softmax is the mechanism of that name.

    >>> longspan.build("softmax", dim=64, heads=4, positions="relative(clamp=100)").spec
    'relative(clamp=100)'

    Raises ValueError for an unknown mechanism or option, naming the known ones, for values that do not fit, for
    positions that the mechanism is not exact for, naming those that are, and where its weights would take more memory
    than this machine has.
    """
    made = functools.partial(make, text, dim, heads, causal=causal, layer=layer, depth=depth, positions=positions)
    if model_memory.allocates_on_cpu():
        model_memory.check_fits_in_memory(
            model_memory.nbytes(model_memory.shapes(made)), f"weights of {typecheck.format_value(text)} with dim={dim}"
        )
    return made()


def make(text: str, dim: int, heads: int, *, causal: bool, layer: int, depth: int, positions: str) -> Attention:
    """``build`` without a look at the memory that it takes."""
    placed = parse(positions)
    if isinstance(text, str) and ";" in text:
        raise ValueError(
            f"{typecheck.format_value(text)} is a stack, and build makes one attention; a stack is built by a model: "
            f"Decoder(DecoderConfig(attention={typecheck.format_value(text)})), or Stack(StackConfig(...)) without "
            "embeddings"
        )

    def maker(cls: type[Attention]) -> Callable[..., Attention]:
        takes = signature(cls)

        def made(*args: Any, **options: Any) -> Attention:
            kind, options = _placed(cls, placed, takes.bind(*args, **options).arguments)
            place, taken = {"causal": causal, "layer": layer, "depth": depth}, spec.options(kind.__init__)
            return kind(dim, heads, **options, **{name: value for name, value in place.items() if name in taken})

        # ``inspect.signature`` reads it; the type of functions does not declare it.
        made.__signature__ = takes  # type: ignore[attr-defined]
        return made

    if name := spec.head(text):
        mechanism(name, "name")
    built = spec.parse(text, {name: maker(cls) for name, cls in REGISTRY.items()})
    if not isinstance(built, Attention):
        raise ValueError(f"{text!r} names no attention; known: {', '.join(sorted(REGISTRY))}")
    return built


def _placed(cls: type[Attention], placed: Positions, options: dict[str, Any]) -> tuple[type[Attention], dict[str, Any]]:
    """The class to build for a mechanism in a model with these positions, and its options.

    Raises ValueError where neither is exact for them.
    """
    given = placed.options()
    if placed.kind not in MISSING:
        return cls, options
    if placed.kind == "rotary":
        kind = cls if "rotary" in own_options(cls) else None
        # A base of the spec's own comes with its own layout.
        given = {} if "rotary" in options else given
    else:
        alike = [one for one in REGISTRY.values() if one.native_positions == placed.kind]
        kind = next((one for one in alike if cls.name in (one.name, one.replaces)), None)
    if kind is None:
        able = ", ".join(name for name in list_mechanisms() if _able(REGISTRY[name], placed.kind))
        raise ValueError(
            f"{cls.name} has no {placed.kind} positions: {MISSING[placed.kind]}; {able} have them, and any mechanism "
            f"goes with none, sinusoidal or learned: positions=, of a training --model.positions"
        )
    given |= options
    if odd := [name for name in given if name not in (known := own_options(kind))]:
        said = f"whose options are {', '.join(known) or 'none'}; not {odd[0]}"
        raise ValueError(f"{cls.name} with {placed.kind} positions is {kind.name}, {said}")
    return kind, given


def _able(cls: type[Attention], kind: str) -> bool:
    """Whether a mechanism has positions of this kind, be it as itself or as another one."""
    if kind == "rotary":
        return "rotary" in own_options(cls)
    return any(one.native_positions == kind and cls.name in (one.name, one.replaces) for one in REGISTRY.values())
