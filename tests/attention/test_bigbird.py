"""Big Bird: window, global and random blocks equal the union of the paper's sets."""

import pytest
import torch

import longspan
from longspan import patterns
from support.sparse import agree, build, data, pairs, past


def bigbird_set(n, b, side, g, drawn, causal):
    """Block by block, as the paper has it: the window, global rows and columns, and what was drawn."""
    seen = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            u, v = i // b, j // b
            seen[i, j] = abs(u - v) <= side or u < g or v < g or v in drawn[u]
    return seen & past(n) if causal else seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("g", "r"), [(0, 0), (1, 0), (0, 2), (2, 1)])
@pytest.mark.parametrize("n", [13, 53])  # below and above (5 + 2 r) b, where others fall back on full attention
def test_it_equals_the_union_of_sets(causal, g, r, n):
    module = build(f"bigbird(block=5, globals={g}, random={r}, seed=3)", causal=causal, layer=2)
    units = torch.arange(-(-n // 5))
    atom = patterns.random(max(r, 1), 3, 5)
    drawn = [atom.draws(units, head, 2).tolist() if r else [()] * len(units) for head in range(2)]
    agree(module, data(n), torch.stack([bigbird_set(n, 5, 1, g, d, causal) for d in drawn]))


@pytest.mark.parametrize("law", ["causal", "parallel_is_recurrent", "padding", "packed", "attention_matrix"])
def test_all_parts_together_keep_the_laws(law):
    """Blocks of the battery's example are larger: a long sequence lists small ones at random slowly."""
    row = longspan.testing.check(law, "bigbird(block=4, globals=1, random=1)")
    assert row.status == "passed", row.note


@pytest.mark.parametrize(("size", "side", "tile"), [(5, 1, 4), (3, 2, 8), (7, 0, 7), (2, 3, 32)])
def test_blocks_around_list_the_tiles_that_they_need(size, side, tile):
    pattern = patterns.blockwise(size, side)
    assert patterns.parse(repr(pattern)) == pattern
    expected = pairs(53, lambda i, j: abs(i // size - j // size) <= side)
    assert pattern.dense(53)[0].equal(expected)
    assert pattern.lookback == pattern.lookahead == int((expected.nonzero().diff(dim=1)).max())
    listed = pattern.blocks(53, tile)
    for row, keys in enumerate(listed.index.tolist()):
        wanted = expected[row * tile : row * tile + tile].any(0).nonzero()[:, 0] // tile
        assert sorted(set(wanted.tolist())) == [key for key in keys if key >= 0]
