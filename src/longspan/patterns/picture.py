"""Patterns as small pictures."""

import torch
from torch import Tensor

from .algebra import Pattern

SEEN, HIDDEN, LATER = 0, 255, 224
SMALLEST, LARGEST = 64, 1024  # tokens of a picture, where nobody says how many


def picture_size(pattern: Pattern, *, heads: int = 1, layer: int = 0) -> int:
    """How many tokens show what a pattern does: the first of 64, 128, ... 1024 at which something is left to see.

    That is, where less than half of the pairs in its order are seen, and a query sees four keys, or no more at twice
    as many tokens. 64 where that is nowhere so, as of a pattern that sees everything.
    """
    n = SMALLEST
    while n <= LARGEST:
        keys, more = (pattern.dense(m, heads=heads, layer=layer).sum(-1) for m in (n, 2 * n))
        pairs = n * (n + 1) / 2 if pattern.lookahead == 0 else n * n
        if keys.sum() < len(keys) * pairs / 2 and keys.max() >= min(4, int(more.max())):
            return n
        n *= 2
    return SMALLEST


def picture(pattern: Pattern, n: int, *, heads: int = 1, layer: int = 0) -> Tensor:
    """What each of n queries sees of n keys, one pixel a pair: -> (heads|1, n, n) uint8, queries downwards.

    Black is seen, white is not; keys after the query that are not seen are light grey. One picture serves all heads
    unless they differ. It is built from the dense matrix, so n is best kept below a few thousand.

    Raises ValueError for n < 1.
    """
    seen = pattern.dense(n, heads=heads, layer=layer)
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    unseen = torch.where(later, LATER, HIDDEN).to(torch.uint8)
    return unseen.masked_fill(seen, SEEN)
