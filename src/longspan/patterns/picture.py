"""Pictures of patterns."""

import torch
from torch import Tensor

from .algebra import Pattern

SEEN, HIDDEN, LATER = 0, 255, 224
SMALLEST, LARGEST = 64, 1024  # tokens of a picture by default


def picture_size(pattern: Pattern, *, heads: int = 1, layer: int = 0) -> int:
    """Choose the number of tokens for a picture of a pattern: the first suitable one of 64, 128, ... 1024.

    A size is suitable if less than half of the pairs are visible, and some query sees four keys or does not see more at
    twice the size.

    Args:
        pattern: The pattern to draw.
        heads: Number of heads.
        layer: The layer, for patterns that differ by layer.

    Returns:
        The number of tokens; 64 if no size is suitable.
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
    """Draw a pattern, one pixel per pair, with queries downwards and keys to the right.

    Visible pairs are black, others white; later keys that are not visible are light gray.

    Args:
        pattern: The pattern to draw.
        n: Number of queries and keys. The dense matrix is built, so keep it below a few thousand.
        heads: Number of heads.
        layer: The layer, for patterns that differ by layer.

    Returns:
        (heads, n, n) uint8, or (1, n, n) if all heads are equal.

    Raises:
        ValueError: For n < 1.
    """
    seen = pattern.dense(n, heads=heads, layer=layer)
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    unseen = torch.where(later, LATER, HIDDEN).to(torch.uint8)
    return unseen.masked_fill(seen, SEEN)
