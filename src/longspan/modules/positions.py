"""Positions: vectors that are added to the tokens, or options of the attentions.

==============================================  ======================================================================
``none``                                        none; order comes from causality, patterns and decays alone
``sinusoidal(layout='interleaved', base=...)``  sines and cosines of the position, added to the tokens
``learned``                                     a table of vectors, ``length`` of them, added to the tokens
``rotary(layout='halves', base=10000.0)``       rotates pairs of channels of queries and keys by the position
``relative(clamp=0)``                           Transformer-XL's four terms, of content and distance
``alibi``                                       scores decrease with the distance, at a fixed slope per head
==============================================  ======================================================================

The first three work with every attention, the others with those that have an exact form: see ``attention.build``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._utils import spec

BASE = 10000.0


def _check_base(kind: str, base: float) -> None:
    if not base > 0:
        raise ValueError(f"{kind}: base={base} must be positive")


@dataclass(frozen=True)
class Positions:
    """No positions, and the base class of the others."""

    kind: ClassVar[str] = "none"

    def options(self) -> dict[str, Any]:
        """Return the options that attentions are built with."""
        return {}


@dataclass(frozen=True)
class Sinusoidal(Positions):
    """Sines and cosines of the position, added to the tokens; see ``sinusoid``.

    Args:
        layout: ``interleaved``: sin and cos of p * base^(-2j/dim) in channels 2j and 2j + 1. ``halves``: all sines
            before all cosines, as in Transformer-XL's code. ``tensor2tensor``: halves with exponents -j / (dim/2 - 1),
            as in that library. The first two differ by a permutation of channels, the third by its wavelengths too.
        base: Base of the wavelengths.

    Raises:
        ValueError: For a base that is not positive.

    References:
        Vaswani et al. 2017 (1706.03762), section 3.5.
    """

    layout: Literal["interleaved", "halves", "tensor2tensor"] = "interleaved"
    base: float = BASE

    kind: ClassVar[str] = "sinusoidal"

    def __post_init__(self):
        _check_base(self.kind, self.base)


@dataclass(frozen=True)
class Learned(Positions):
    """A table of learned vectors, added to the tokens."""

    kind: ClassVar[str] = "learned"


@dataclass(frozen=True)
class Rotary(Positions):
    """Rotates pairs of channels of queries and keys by position * base^(-2j/D).

    Args:
        layout: ``halves``: channel j is paired with j + D/2 (GPT-NeoX, Llama). ``interleaved``: 2j with 2j + 1
            (RoFormer). Weights for one layout need their rows permuted for the other.
        base: Base of the angles.

    Raises:
        ValueError: For a base that is not positive.

    References:
        Su et al. 2021 (2104.09864), eq. 34.
    """

    layout: Literal["halves", "interleaved"] = "halves"
    base: float = BASE

    kind: ClassVar[str] = "rotary"

    def __post_init__(self):
        _check_base(self.kind, self.base)

    def options(self) -> dict[str, Any]:
        return {"rotary": float(self.base), "rotary_layout": self.layout}


@dataclass(frozen=True)
class Relative(Positions):
    """Scores of content and distance: the four terms of Transformer-XL.

    Args:
        clamp: Larger distances are treated as this one; 0: no limit.

    Raises:
        ValueError: For a negative clamp.

    References:
        Dai et al. 2019 (1901.02860), section 3.3.
    """

    clamp: int = 0

    kind: ClassVar[str] = "relative"

    def __post_init__(self):
        if self.clamp < 0:
            raise ValueError(f"relative: clamp={self.clamp} must be positive, or 0 for no limit")

    def options(self) -> dict[str, Any]:
        return {"clamp": self.clamp} if self.clamp else {}


@dataclass(frozen=True)
class Alibi(Positions):
    """Subtracts a slope per head times the distance from each score (Press et al. 2021, 2108.12409, section 3)."""

    kind: ClassVar[str] = "alibi"


POSITION_TYPES = {one.kind: one for one in (Positions, Sinusoidal, Learned, Rotary, Relative, Alibi)}
# Positions that an attention must implement; each reason ends the error message if it does not.
MISSING = {
    "rotary": "it has no rotary form",
    "relative": "it has no relative scores",
    "alibi": "it has no scores that decrease with the distance",
}


def parse(text: str) -> Positions:
    """Build the positions of a spec, such as ``rotary`` or ``rotary(layout='interleaved', base=500.0)``.

    Raises:
        ValueError: For unknown positions or options, and values of another type or out of range.

    Example:
        >>> parse("rotary(base=500.0)")
        Rotary(layout='halves', base=500.0)
    """
    if name := spec.head(text):
        spec.known(name, POSITION_TYPES, "positions")
    made = spec.parse(text, POSITION_TYPES)
    if not isinstance(made, Positions):
        raise ValueError(f"{text!r} is not a kind of positions; known: {', '.join(sorted(POSITION_TYPES))}")
    return made
