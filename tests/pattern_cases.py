"""Patterns to test with: every atom, the compounds of published mechanisms, and expressions made at random."""

import random as dice

from longspan.patterns import (
    Pattern,
    band,
    block,
    blockwise,
    by_head,
    by_layer,
    causal,
    dilated,
    everywhere,
    fixed,
    globals,
    local1d,
    local2d,
    prefix,
    random,
    strided,
)

ATOMS: list[Pattern] = [
    causal(),
    band(7),
    band(3, 5),
    dilated(2, 5),
    strided(6),
    block(9),
    fixed(8, 3),
    globals(2),
    prefix(4),
    globals((3, 17)),
    everywhere(),
    random(3, seed=4),
    random(2, seed=1, block=4),
    local1d(5, 3),
    blockwise(5, 1),
    local2d((2, 3), (3, 2), 6),
    band(0),
    strided(13),
]

# What mechanisms are made of: their bounds must be exact.
LISTED = (
    "band(6) | strided(7)",
    "causal & (band(6) | strided(7))",
    "band(4, 4) | globals(3)",
    "causal & (band(4) | globals(3))",
    "causal & dilated(3, 4)",
    "causal & (block(7) | fixed(7, 2))",
    "causal & block(7)",
    "causal & local1d(6, 5)",
    "blockwise(6, 1) | globals(3)",
    "causal & local2d((2, 3), (2, 2), 12)",
    "causal | prefix(5)",
    "causal & (random(2) | band(4) | globals(2))",
    "band(6) & strided(4)",
    "causal & by_head(band(3), dilated(2, 3))",
)


def expressions(count: int, *, seed: int) -> list[Pattern]:
    """Expressions of up to four operators over all atoms and both choices, the same ones for the same seed."""
    generator = dice.Random(seed)

    def make(depth: int) -> Pattern:
        if depth == 0 or generator.random() < 0.25:
            return generator.choice(ATOMS)
        left, right = make(depth - 1), make(depth - 1)
        match generator.randrange(8):
            case 0 | 1:
                return left & right
            case 2 | 3:
                return left | right
            case 4 | 5 | 6:
                return left - right
        return generator.choice((by_head, by_layer))(left, right)

    return [make(generator.choice((1, 2, 2, 3))) for _ in range(count)]
