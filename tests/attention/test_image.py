"""Image transformer: local blocks against their coordinates, in the order of generation."""

import pytest

from longspan import patterns
from support.sparse import N, agree, build, data, pairs, past

SHAPE, BLOCK, MEMORY = (6, 12), (2, 3), (3, 2)  # pixels of an image, of a block, and seen around one


def rectangle(i, j):
    """What a query at raster pixel i may see of j, drawn before or after: from coordinates alone."""
    (y, x), (v, u) = divmod(i, SHAPE[1]), divmod(j, SHAPE[1])
    top, left = y // BLOCK[0] * BLOCK[0], x // BLOCK[1] * BLOCK[1]
    above = top - MEMORY[0] <= v < top and left - MEMORY[1] <= u < left + BLOCK[1] + MEMORY[1]
    beside = top <= v < top + BLOCK[0] and left - MEMORY[1] <= u < left + BLOCK[1]
    return above or beside


spec = f"image(kind='2d', block={BLOCK}, memory={MEMORY}, width={SHAPE[1]})"


@pytest.mark.parametrize(("block", "memory"), [(5, 3), (4, 4), (3, 0), (7, 11)])
def test_one_dimension_equals_the_papers_memory(block, memory):
    expected = pairs(N, lambda i, j: j >= i // block * block - memory) & past(N)
    agree(build(f"image(block={block}, memory={memory})"), data(N), expected)
    assert build(f"image(block={block}, memory={memory})").init_state(1).keys.shape[2] == block + memory


def test_two_dimensions_equal_their_rectangles():
    order = patterns.block_order(*SHAPE, BLOCK)
    n = len(order)
    expected = pairs(n, rectangle)[order][:, order] & past(n)
    agree(build(spec), data(n), expected)
