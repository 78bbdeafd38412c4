"""Which keys may a query see: values that one can print, compare, combine with ``& | -``, draw, and run fast.

A pattern is a set of pairs (i, j), query position i and key position j, both counted from 0. True means that the query
sees the key. ``a & b`` holds the pairs in both, ``a | b`` those in either, ``a - b`` those of a that are not in b.

Every pattern is a function of (i, j, head, layer) alone, never of the length: a longer sequence changes nothing for the
tokens that were there. Packed sequences are no pattern, since where they end is data: ``segments`` is an argument of
the mechanisms.

Equality is that of a canonical form: equal values are the same set, unequal ones need not differ. ``&`` and ``|`` are
flattened, sorted and free of duplicates; a difference is kept as parts that are all wanted and parts that are all
removed; ``everywhere`` and ``nowhere`` vanish where they change nothing. So the laws of idempotence, commutation,
absorption, complement and de Morgan (of the complement ``everywhere() - a``) give equal values. The distributive laws
do not, nor do sets that agree for a reason of arithmetic: ``dilated(3, 1) != band(3, 3)``.
"""

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
    """The pattern that a spec names, such as ``"band(256) | strided(64)"``; a pattern is given back as it is.

    Python's precedence holds: ``-`` binds closest, then ``&``, then ``|``. Raises ValueError for text that names none.

    >>> parse("causal & dilated(3, stride=2)").lookback
    6
    """
    value = text if isinstance(text, Pattern) else spec.parse(text, NAMES)
    if not isinstance(value, Pattern):
        raise ValueError(f"{text!r} is no pattern; a pattern reads like 'band(256) | strided(64)'")
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
