"""How a model knows the order of its tokens: vectors added to them, or something of its attentions' own.

==============================================  ======================================================================
``none``                                        nothing; order comes from causality, patterns and decays alone
``sinusoidal(layout='interleaved', base=...)``  sines and cosines of the position, added to the tokens
``learned``                                     a table of vectors, ``length`` of them, added to the tokens
``rotary(layout='halves', base=10000.0)``       pairs of channels of queries and keys turn with the position
``relative(clamp=0)``                           Transformer-XL's four terms, of content and distance
``alibi``                                       scores fall with the distance, at a fixed slope per head
==============================================  ======================================================================

The first three go with every attention, the others with those that are exact for them: see ``base.make``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._utils import spec

BASE = 10000.0


def _check_base(kind: str, base: float) -> None:
    if not base > 0:
        raise ValueError(f"{kind}: base={base} is that of the wave lengths; it must be positive")


@dataclass(frozen=True)
class Positions:
    """Positions of any kind; of itself, none."""

    kind: ClassVar[str] = "none"

    def options(self) -> dict[str, Any]:
        """What attentions are built with."""
        return {}


@dataclass(frozen=True)
class Sinusoidal(Positions):
    """Sines and cosines of position p, with j from 0: see ``layers.sinusoid``.

    ``layout``: interleaved, sin and cos of p * base^(-2j/dim) in channels 2j and 2j + 1 (Vaswani et al. 2017, section
    3.5); halves, all sines before all cosines, as in Transformer-XL's code; tensor2tensor, halves with exponents
    -j / (dim/2 - 1), so that the longest wave is ``base`` itself, as in that library. The first two differ by a
    permutation of channels, the third by its wave lengths too.

    Raises ValueError for a base that is not positive.
    """

    layout: Literal["interleaved", "halves", "tensor2tensor"] = "interleaved"
    base: float = BASE

    kind: ClassVar[str] = "sinusoidal"

    def __post_init__(self):
        _check_base(self.kind, self.base)


@dataclass(frozen=True)
class Learned(Positions):
    """A table of vectors."""

    kind: ClassVar[str] = "learned"


@dataclass(frozen=True)
class Rotary(Positions):
    """Pairs of channels turn by position * base^(-2j/D): Su et al. 2021 (2104.09864), eq. 34.

    ``layout``: halves, channel j is paired with j + D/2 (GPT-NeoX, Llama); interleaved, 2j with 2j + 1 (RoFormer).
    Weights made for one need their rows permuted for the other.

    Raises ValueError for a base that is not positive.
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
    """Scores of content and distance, the four terms of Dai et al. 2019 (1901.02860), section 3.3.

    ``clamp``: the largest distance that is told apart (0: all are).

    Raises ValueError for a negative clamp.
    """

    clamp: int = 0

    kind: ClassVar[str] = "relative"

    def __post_init__(self):
        if self.clamp < 0:
            raise ValueError(f"relative: clamp={self.clamp} must be positive, or 0 to tell all distances apart")

    def options(self) -> dict[str, Any]:
        return {"clamp": self.clamp} if self.clamp else {}


@dataclass(frozen=True)
class Alibi(Positions):
    """A slope per head times the distance is taken from each score: Press et al. 2021 (2108.12409), section 3."""

    kind: ClassVar[str] = "alibi"


POSITION_TYPES = {one.kind: one for one in (Positions, Sinusoidal, Learned, Rotary, Relative, Alibi)}
# What an attention has to be exact for, and what of it: the end of the message where it is not.
ASKED = {
    "rotary": "it has no rotary form, which turns the pairs of channels of queries and keys",
    "relative": "it has no scores of content and distance",
    "alibi": "it has no scores that could fall with the distance",
}


def parse(text: str) -> Positions:
    """The positions that a spec names, such as ``rotary`` or ``rotary(layout='interleaved', base=500.0)``.

    >>> parse("rotary(base=500.0)")
    Rotary(layout='halves', base=500.0)

    Raises ValueError for others, for an unknown option, and for a value that does not fit.
    """
    if name := spec.head(text):
        spec.known(name, POSITION_TYPES, "positions")
    made = spec.parse(text, POSITION_TYPES)
    if not isinstance(made, Positions):
        raise ValueError(f"{text!r} names no positions; known: {', '.join(sorted(POSITION_TYPES))}")
    return made
