"""Block lists: no allowed pair is missed, what is listed is needed, full is full, and no matrix of pairs is built."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longspan import patterns
from longspan.patterns import Pattern, band, block, by_head, causal, globals, parse, strided
from longspan.patterns import blocks as tiling
from pattern_cases import ATOMS, LISTED, expressions


def tiles(pattern: Pattern, n: int, size: int, start: int, head: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles have an allowed pair, and which have all, from the dense matrix: (nb, nk) each."""
    total = start + n
    dense = pattern.dense(n, total, heads=head + 1, layer=layer)[-1]
    query, key = torch.arange(start, total) // size - start // size, torch.arange(total) // size
    shape = int(query[-1]) + 1, int(key[-1]) + 1
    where = (query[:, None] * shape[1] + key).flatten()
    allowed = torch.zeros(shape[0] * shape[1]).index_add(0, where, dense.flatten().float()).view(shape)
    pairs = torch.zeros(shape[0] * shape[1]).index_add(0, where, torch.ones(len(where))).view(shape)
    return allowed > 0, allowed == pairs


def listed(found: patterns.Blocks, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from a block list, whose form is checked on the way."""
    index, full = found.index, found.full
    assert index.dtype == torch.int64
    assert full.dtype == torch.bool
    assert index.shape == full.shape
    assert index.shape[1] >= 1
    there = index >= 0
    assert (there.sum(1).max() == index.shape[1]) or not there.any()
    assert not (there[:, 1:] & ~there[:, :-1]).any()
    assert (index[~there] == -1).all()
    assert ((index[:, 1:] > index[:, :-1]) | ~there[:, 1:]).all()
    assert not full[~there].any()
    some, whole = torch.zeros(2, len(index), count, dtype=torch.bool)
    row, _ = there.nonzero(as_tuple=True)
    some[row, index[there]] = True
    whole[row, index[there]] = full[there]
    return some, whole


def agree(pattern: Pattern, n: int, size: int, start: int = 0, head: int = 0, layer: int = 0) -> None:
    some, whole = tiles(pattern, n, size, start, head, layer)
    found = pattern.blocks(n, size, start=start, head=head, layer=layer)
    assert found.size == size
    assert len(found.index) == len(some)
    got, full = listed(found, some.shape[1])
    assert torch.equal(got, some), (pattern, n, size, start)
    assert torch.equal(full, whole), (pattern, n, size, start)


# n a multiple of the block and not, smaller than a block, one token, and queries that start inside a block.
SHAPES = (
    (60, 4, 0),
    (57, 4, 0),
    (61, 7, 0),
    (53, 16, 0),
    (5, 8, 0),
    (1, 3, 0),
    (61, 1, 0),
    (23, 6, 31),
    (1, 5, 44),
    (9, 64, 20),
)


@pytest.mark.parametrize("pattern", [*ATOMS, *map(parse, LISTED)], ids=str)
def test_lists_of_atoms_and_published_patterns(pattern):
    for n, size, start in SHAPES:
        for head in (0, 1):
            agree(pattern, n, size, start, head)


@pytest.mark.parametrize("seed", range(25))
def test_lists_of_any_expression(seed):
    for number, pattern in enumerate(expressions(70, seed=100 + seed)):
        n, size, start = SHAPES[number % len(SHAPES)]
        agree(pattern, n, size, start, head=number % 3, layer=number % 2)


@pytest.mark.parametrize("budget", [0, 9 * 20])
def test_without_a_look_at_pairs_nothing_is_missed_and_nothing_is_called_full(budget, monkeypatch):
    monkeypatch.setattr(tiling, "BUDGET", budget)
    for number, pattern in enumerate(expressions(150, seed=9)):
        n, size, start = SHAPES[number % len(SHAPES)]
        some, whole = tiles(pattern, n, size, start, number % 3, 0)
        got, full = listed(pattern.blocks(n, size, start=start, head=number % 3), some.shape[1])
        assert not (some & ~got).any(), pattern
        assert not (full & ~whole).any(), pattern


@pytest.mark.parametrize(
    "pattern", [*ATOMS, parse("causal & (band(9) | strided(7))"), parse("fixed(7, 2) - prefix(9)")]
)
def test_atoms_and_expressions_of_one_kind_need_no_look_at_pairs(pattern, monkeypatch):
    monkeypatch.setattr(tiling, "BUDGET", 0)
    for n, size, start in SHAPES:
        agree(pattern, n, size, start)


def test_all_tiles_or_a_table_of_candidates_give_one_list(monkeypatch):
    for dense in (1, 1 << 30):
        monkeypatch.setattr(tiling, "DENSE", dense)
        for pattern in [*ATOMS, *map(parse, LISTED), *expressions(100, seed=10)]:
            agree(pattern, 47, 5, start=6)


def test_a_list_by_hand():
    found = band(3).blocks(10, 4)
    assert found.index.tolist() == [[0, -1], [0, 1], [1, 2]]
    assert found.full.tolist() == [[False, False]] * 3
    found = causal().blocks(4, 2, start=5)
    assert found.index.tolist() == [[0, 1, 2, -1, -1], [0, 1, 2, 3, -1], [0, 1, 2, 3, 4]]
    assert found.full.tolist() == [[True] * 3 + [False] * 2, [True] * 3 + [False] * 2, [True] * 5]
    nothing = (causal() - causal()).blocks(5, 2)
    assert nothing.index.tolist() == [[-1]] * 3
    assert nothing.full.tolist() == [[False]] * 3


def test_a_head_has_its_own_list():
    pattern = causal() & by_head(band(2), strided(8))
    assert torch.equal(pattern.blocks(40, 4, head=2).index, band(2).blocks(40, 4).index)
    assert torch.equal(pattern.blocks(40, 4, head=1).index, (causal() & strided(8)).blocks(40, 4).index)


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation makes, and the sum of all that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            # A view that is expanded has more elements than memory.
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


LONG = {
    # pattern: largest tensor in bytes. 65,536 positions in blocks of 128 are 512 x 512 tiles; all pairs would be 4 GiB.
    "causal & band(255)": 1 << 21,
    "band(256, 256)": 1 << 21,
    "causal & (band(255) | globals(4))": 1 << 21,
    "causal & dilated(3, 512)": 1 << 21,
    "causal & block(512)": 1 << 21,
    "causal & local1d(256, 256)": 1 << 21,
    "causal & local2d((8, 16), (8, 16), 256)": 1 << 21,
    "by_head(band(63), strided(512)) & causal": 1 << 21,
    "causal": 1 << 21,
    "everywhere": 1 << 21,
    "causal & (band(255) | strided(256))": 1 << 21,
    "causal & (block(128) | fixed(128, 8))": 1 << 23,
    "band(128, 128) | globals(64)": 1 << 23,
    "causal | prefix(1000)": 1 << 21,
    "causal & (random(3) | band(127) | globals(2))": 1 << 23,
    "band(128, 128) | globals(64) | random(3, block=64)": 1 << 23,
}


@pytest.mark.parametrize("text", LONG)
def test_a_long_sequence_needs_no_matrix_of_pairs(text, monkeypatch):
    monkeypatch.setattr(Pattern, "dense", lambda *_, **__: pytest.fail("the dense matrix was built"))
    pattern, n, size = parse(text), 65536, 128
    with Sizes() as sizes:
        found = pattern.blocks(n, size)
    assert sizes.largest <= LONG[text], sizes.largest
    # Far from the ends a list looks like those of its neighbors, so a cut from the middle can be held to the matrix.
    start = n - 2 * size
    some, _ = listed(found, n // size)
    queries = torch.arange(start, n)[:, None]
    for row in (-1, -2):
        allowed = pattern.allow(queries[row * size :][:size], torch.arange(n)).view(size, -1, size)
        assert not (allowed.any(2).any(0) & ~some[row]).any()


def test_a_window_costs_no_more_than_its_tiles():
    # A million positions: 15,625 blocks. A window of 256 needs 5, the globals 1 more, a block of 100 up to 2 ahead.
    pattern = causal() & (band(256) | globals(3)) | block(100)
    with Sizes() as sizes:
        found = pattern.blocks(1_000_000, 64)
    assert found.index.shape[1] <= 8
    assert sizes.largest <= 2 * 8 * 1_000_001
