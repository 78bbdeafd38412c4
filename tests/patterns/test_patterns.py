"""Patterns: which keys each row sees, how far it looks, what is refused, and how it is drawn."""

import itertools
import random as dice

import pytest
import torch
from torch import Tensor

from longspan import patterns
from longspan.patterns import (
    band,
    block,
    block_order,
    blockwise,
    by_head,
    by_layer,
    causal,
    columns,
    dilated,
    everywhere,
    fixed,
    globals,
    local1d,
    local2d,
    nowhere,
    parse,
    picture,
    prefix,
    random,
    rows,
    strided,
)
from pattern_cases import ATOMS, LISTED, expressions

N = 53


def seen(pattern: patterns.Pattern, n: int = N, **place: int) -> list[set[int]]:
    """The keys that each query sees, found pair by pair."""
    return [{j for j in range(n) if pattern.allow(torch.tensor(i), torch.tensor(j), **place)} for i in range(n)]


def between(low: int, high: int) -> set[int]:
    """low ... high of the positions that there are."""
    return set(range(max(low, 0), min(high, N - 1) + 1))


SETS = {
    "causal": lambda i: between(0, i),
    "everywhere": lambda i: between(0, N),
    "nowhere": lambda i: set(),
    "band(5)": lambda i: between(i - 5, i),
    "band(5, 3)": lambda i: between(i - 5, i + 3),
    "band(0)": lambda i: {i},
    "dilated(2, 7)": lambda i: {i - 14, i - 7, i, i + 7, i + 14} & between(0, N),
    "strided(11)": lambda i: set(range(i % 11, N, 11)),
    "block(10)": lambda i: between(i - i % 10, i - i % 10 + 9),
    "fixed(10, 3)": lambda i: {j for j in range(N) if j % 10 in (7, 8, 9)},
    "globals(2)": lambda i: between(0, N) if i < 2 else {0, 1},
    "globals((4, 9))": lambda i: between(0, N) if i in (4, 9) else {4, 9},
    "prefix(6)": lambda i: between(0, 5),
    "causal | prefix(6)": lambda i: between(0, max(i, 5)),
    "local1d(10, 4)": lambda i: between(i - i % 10 - 4, i - i % 10 + 9),
    "blockwise(10, 1)": lambda i: between(i - i % 10 - 10, i - i % 10 + 19),
    "local1d(1, 4)": lambda i: between(i - 4, i),
    "causal & band(5, 3)": lambda i: between(i - 5, i),
    "band(5) - band(1)": lambda i: between(i - 5, i - 2),
    "causal & dilated(2, 7)": lambda i: {i - 14, i - 7, i} & between(0, N),
    "by_layer(causal, band(3))": lambda i: between(0, i),
}


@pytest.mark.parametrize("text", SETS)
def test_each_row_sees_its_keys(text):
    assert seen(parse(text)) == [SETS[text](i) for i in range(N)]


@pytest.mark.parametrize("pattern", [random(5, seed=3), random(1), random(60, seed=2)])
def test_random_rows_draw_different_keys_from_their_past(pattern):
    dense = pattern.dense(N)[0]
    assert not dense.triu(1).any()
    assert dense.sum(1).tolist() == [min(i + 1, pattern.keys) for i in range(N)]


def test_random_keys_are_uniform():
    # 1000 heads draw 3 of 20 keys: each is expected 150 times, with a standard deviation of 11.3.
    row = torch.tensor(19)
    drawn = torch.stack([random(3, seed=5).draws(row, head, 0) for head in range(1000)])
    counts = drawn.flatten().bincount(minlength=20)
    assert counts.sum() == 3000
    assert (counts - 150).abs().max() < 5 * 11.3
    # Each of the 190 pairs is expected 15.8 times, with a standard deviation of 3.9.
    x, y = drawn[:, [0, 0, 1]].flatten(), drawn[:, [1, 2, 2]].flatten()
    pairs = (x.minimum(y) * 20 + x.maximum(y)).bincount(minlength=400).view(20, 20)
    assert (pairs[torch.ones(20, 20).triu(1) > 0] - 3000 / 190).abs().max() < 5 * 3.9


def test_random_draws_depend_on_seed_layer_and_head_and_on_nothing_else():
    a = random(3, seed=1)
    places = [a.dense(N, heads=2)[0], a.dense(N, heads=2)[1], a.dense(N, layer=1)[0], random(3, seed=2).dense(N)[0]]
    assert all(not torch.equal(x, y) for x, y in itertools.combinations(places, 2))
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = a.dense(N)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, a.dense(N))


def test_random_draws_stay_what_they_are():
    drawn = random(3, seed=7).draws(torch.tensor([0, 1, 2, 50, 1000]), 1, 2)
    assert drawn.tolist() == [[-1, -1, 0], [-1, 0, 1], [0, 1, 2], [25, 41, 32], [40, 76, 183]]


@pytest.mark.parametrize("pattern", expressions(60, seed=1))
def test_a_longer_sequence_changes_nothing_for_the_tokens_that_were_there(pattern):
    long = pattern.dense(N, heads=3, layer=1)
    assert torch.equal(pattern.dense(31, heads=3, layer=1), long[:, :31, :31])
    assert torch.equal(pattern.dense(7, 31, heads=3, layer=1), long[:, 24:31, :31])


def test_pixels_see_rows_columns_and_both():
    y, x = torch.arange(35) // 7, torch.arange(35) % 7
    row, column = rows(7).dense(35)[0], columns(7).dense(35)[0]
    assert torch.equal(row, y[:, None] == y)
    assert torch.equal(column, x[:, None] == x)
    assert (row.long() @ column.long() > 0).all()


@pytest.mark.parametrize("memory", [(2, 2), (0, 3), (3, 0), (0, 0), (5, 9), (20, 20)])
@pytest.mark.parametrize("cut", [(2, 3), (1, 1), (4, 6), (8, 12)])
def test_pixels_see_the_rectangle_of_their_block(cut, memory):
    (h, w), (up, side), height, width = cut, memory, 8, 12
    order = block_order(height, width, cut).tolist()
    expected = torch.zeros(len(order), len(order), dtype=torch.bool)
    for (i, query), (j, key) in itertools.product(enumerate(order), enumerate(order)):
        top, left = query // width // h * h, query % width // w * w
        y, x = divmod(key, width)
        above = top - up <= y < top and left - side <= x < left + w + side
        level = top <= y < top + h and left - side <= x < left + w
        expected[i, j] = above or level
    pattern = local2d(cut, memory, width)
    assert torch.equal(pattern.dense(len(order))[0], expected)
    # What lies outside the block came before it in this order.
    later = expected.triu(1).nonzero()
    assert (later[:, 0] // (h * w) == later[:, 1] // (h * w)).all()


def test_block_order_is_raster_order_of_blocks():
    assert block_order(2, 4, (2, 2)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    order = block_order(6, 8, (3, 2))
    assert order.sort().values.tolist() == list(range(48))
    assert torch.equal(block_order(6, 8, (1, 8)), torch.arange(48))
    assert torch.equal(local2d((6, 8), (0, 0), 8).dense(48)[0], torch.ones(48, 48, dtype=torch.bool))


def test_heads_and_layers_choose_in_turn():
    a, b, c = band(3), strided(5), block(7)
    chosen = by_head(a, by_layer(b, c))
    for layer, parts in enumerate([(a, b), (a, c), (a, b)]):
        expected = torch.stack([p.dense(N)[0] for p in parts * 2])
        assert torch.equal(chosen.dense(N, heads=4, layer=layer), expected)
    assert chosen.per_head
    assert not by_layer(b, c).per_head
    assert not by_head(b, b).per_head
    assert by_head(random(2), random(2)).per_head
    assert (causal() & by_head(a, b)).per_head
    assert (a - random(2)).per_head
    assert (a | random(2)).per_head
    assert by_head(a, b).dense(N).shape == (1, N, N)


def test_positions_outside_the_length_see_nothing():
    i = torch.tensor([-1, 0, 5, 6])
    allowed = everywhere().allow(i[:, None], i, n=6)
    inside = torch.tensor([False, True, True, False])
    assert torch.equal(allowed, inside[:, None] & inside)
    assert prefix(3).allow(i[:, None], torch.tensor(2)).shape == (4, 1)
    assert nowhere().allow(i[:, None], i.int()).shape == (4, 4)


def reach(dense: Tensor) -> tuple[int, int]:
    """The largest i - j and j - i of a matrix, at least 0."""
    _, i, j = dense.nonzero(as_tuple=True)
    return max([0, *(i - j).tolist()]), max([0, *(j - i).tolist()])


@pytest.mark.parametrize("pattern", [*ATOMS, *map(parse, LISTED)], ids=str)
def test_bounds_are_exact(pattern):
    # An unbounded look grows with the length; a bounded one is reached by 97 positions.
    size = 97
    for bound, found, longer in zip(
        (pattern.lookback, pattern.lookahead),
        reach(pattern.dense(size, heads=8)),
        reach(pattern.dense(2 * size, heads=8)),
        strict=True,
    ):
        if bound is None:
            assert longer > max(found, size)
        else:
            assert found == longer == bound


@pytest.mark.parametrize("pattern", expressions(300, seed=7), ids=str)
def test_bounds_are_never_too_small(pattern):
    back, ahead = reach(pattern.dense(67, heads=3, layer=1))
    assert pattern.lookback is None or pattern.lookback >= back
    assert pattern.lookahead is None or pattern.lookahead >= ahead


@pytest.mark.parametrize("choose", [by_head, by_layer])
def test_bounds_of_choices_are_the_largest(choose):
    pattern = choose(band(5), band(1, right=3))
    assert (pattern.lookback, pattern.lookahead) == (5, 3)
    assert choose(band(5), causal()).reach == (None, 0)


def test_bounds_of_differences_are_exact():
    generator = dice.Random(8)
    for _ in range(300):
        a, b, c = generator.choices([band(5), band(4, 9), dilated(3, 4), strided(3), strided(5), causal()], k=3)
        pattern = generator.choice([(a & b) | c, a & b & c, (a - b) | c, (a | b) - c, a & b - c])
        found = reach(pattern.dense(80))
        assert pattern.lookback in (None, found[0]), pattern
        assert pattern.lookahead in (None, found[1]), pattern


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: band(-1), "left=-1 must be a whole number of at least 0"),
        (lambda: band(1, 0.5), "right=0.5 must be a whole number of at least 0"),
        (lambda: dilated(-1, 2), "window=-1 must be"),
        (lambda: dilated(1, 0), "stride=0 must be a whole number of at least 1"),
        (lambda: strided(0), "stride=0 must be"),
        (lambda: block(0), "size=0 must be"),
        (lambda: block(True), "size=True must be"),
        (lambda: rows(0), "width=0 must be"),
        (lambda: columns(-2), "width=-2 must be"),
        (lambda: fixed(0, 1), "block=0 must be"),
        (lambda: fixed(3, 0), "summary=0 must be"),
        (lambda: fixed(3, 4), "summary=4 .* block=3"),
        (lambda: prefix(0), "n=0 must be"),
        (lambda: globals(0), "number of globals=0 must be a whole number of at least 1"),
        (lambda: globals(()), "number of globals=0 must be"),
        (lambda: globals((1, -1)), "index=-1 must be"),
        (lambda: random(0), "keys=0 must be"),
        (lambda: random(1, seed=-1), "seed=-1 must be"),
        (lambda: random(1, seed=1 << 32), "seed=4294967296 must be at most 4294967295"),
        (lambda: random(1, block=0), "block=0 must be"),
        (lambda: blockwise(0, 1), "size=0 must be"),
        (lambda: blockwise(band(2), 16), r"size=band\(left=2, right=0\) must be"),
        (lambda: blockwise(3, -1), "side=-1 must be"),
        (lambda: local1d(0, 1), "block=0 must be"),
        (lambda: local1d(1, -1), "memory=-1 must be"),
        (lambda: local2d((2, 3), (1, 1), 10), "width=10 is not a multiple of the block's width 3"),
        (lambda: local2d((0, 3), (1, 1), 9), "block's height=0 must be"),
        (lambda: local2d((2, 3), (1, -1), 9), "memory's width=-1 must be"),
        (lambda: local2d(3, (1, 1), 9), r"block=3 must be \(height, width\)"),
        (lambda: local2d((2, 3), (1, 1), 0), "width=0 must be"),
        (lambda: block_order(7, 9, (2, 3)), "an image of 7 x 9 .* 2 x 3"),
        (lambda: block_order(0, 9, (2, 3)), "height=0 must be"),
        (lambda: by_head(), r"by_head\(\) has no pattern"),
        (lambda: by_layer(band(1), 3), "by_layer .*, not 3"),
        (lambda: parse("3"), "'3' is not a pattern"),
        (lambda: parse("bend(3)"), "did you mean 'band'"),
        (lambda: parse("band"), "missing a required argument: 'left'"),
        (lambda: causal().allow(torch.tensor(1.0), torch.tensor(1)), "positions are torch.float32 and torch.int64"),
        (lambda: causal().allow(torch.tensor(1), torch.tensor(1), head=-1), "head=-1 must be"),
        (lambda: causal().allow(torch.tensor(1), torch.tensor(1), layer=-1), "layer=-1 must be"),
        (lambda: causal().dense(0), "n=0 must be"),
        (lambda: causal().dense(3, 2), "m=2 must be a whole number of at least 3"),
        (lambda: causal().dense(3, heads=0), "heads=0 must be"),
        (lambda: causal().blocks(0, 4), "n=0 must be"),
        (lambda: causal().blocks(4, 0), "size=0 must be"),
        (lambda: causal().blocks(4, 4, start=-1), "start=-1 must be"),
        (lambda: causal().blocks(4, 4, head=-1), "head=-1 must be"),
        (lambda: causal().blocks(4, 4, layer=-1), "layer=-1 must be"),
        (lambda: picture(causal(), 0), "n=0 must be"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_picture_shows_seen_hidden_and_later():
    assert picture(band(1), 3).tolist() == [[[0, 224, 224], [0, 0, 224], [255, 0, 0]]]
    assert picture(globals((1,)), 3).tolist() == [[[255, 0, 224], [0, 0, 0], [255, 0, 255]]]
    image = picture(by_head(causal(), band(1)), 5, heads=2)
    assert image.shape == (2, 5, 5)
    assert image.dtype == torch.uint8
    assert torch.equal(image == 0, by_head(causal(), band(1)).dense(5, heads=2))
