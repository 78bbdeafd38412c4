"""Patterns: which keys each query sees, as values that can be printed, compared, combined and drawn.

A pattern is a set of pairs (i, j), query position i and key position j, both counted from 0. True means that the query
sees the key. ``a & b`` holds the pairs in both, ``a | b`` those in either, ``a - b`` those of a that are not in b.

Every pattern is a function of (i, j, head, layer) alone, never of the length: appending tokens does not change earlier
rows. Packed sequences are not a pattern, because their ends are data: mechanisms take ``segments`` instead.

Patterns are compared by a canonical form: equal values are the same set, but unequal values may be the same set too.
``&`` and ``|`` are flattened, sorted and free of duplicates. A difference is kept as wanted parts and removed parts.
``everywhere`` and ``nowhere`` vanish if they change nothing. So idempotence, commutation, absorption, complement and de
Morgan (of the complement ``everywhere() - a``) give equal values. The distributive laws do not, and neither do sets
that agree by arithmetic: ``dilated(3, 1) != band(3, 3)``.
"""

import functools

from .._utils import spec
from .algebra import Pattern, everywhere, nowhere
from .atoms import band, block, blockwise, causal, dilated, fixed, globals, local1d, prefix, random, strided
from .blocks import Blocks
from .choice import by_head, by_layer
from .grid import block_order, columns, local2d, rows
from .picture import picture, picture_size

NAMES = {
    made.__name__: made
    for made in (
        *(causal, everywhere, nowhere, band, dilated, strided, block, blockwise, fixed, globals, prefix, random),
        *(rows, columns, local1d, local2d, by_head, by_layer),
    )
}


def parse(text: str | Pattern) -> Pattern:
    """Build the pattern that a spec describes, such as ``"band(256) | strided(64)"``.

    Args:
        text: The spec, or a pattern, which is returned as it is. Precedence is that of Python: ``-``, ``&``, ``|``.

    Raises:
        ValueError: If the text is not a pattern.

    Example:
        >>> parse("causal & dilated(3, stride=2)").lookback
        6
    """
    if isinstance(text, Pattern):
        return text
    known = isinstance(text, str)  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
    return (_parsed if known else _parsed.__wrapped__)(text)


@functools.lru_cache(1024)  # a mechanism reads its pattern in every call
def _parsed(text: str) -> Pattern:
    value = spec.parse(text, NAMES)
    if not isinstance(value, Pattern):
        raise ValueError(f"{text!r} is not a pattern; write one like 'band(256) | strided(64)'")
    return value


__all__ = [
    "NAMES",
    "Blocks",
    "Pattern",
    "band",
    "block",
    "block_order",
    "blockwise",
    "by_head",
    "by_layer",
    "causal",
    "columns",
    "dilated",
    "everywhere",
    "fixed",
    "globals",
    "local1d",
    "local2d",
    "nowhere",
    "parse",
    "picture",
    "picture_size",
    "prefix",
    "random",
    "rows",
    "strided",
]
