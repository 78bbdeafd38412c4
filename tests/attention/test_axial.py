"""Axial attention: columns and rows of an image against their coordinates."""

import pytest
import torch

from support.sparse import N, agree, build, data, dense, heads_of, pairs, past, softmax

C = 7  # the last row of pixels is cut short


def column(i, j):
    return i % C == j % C


def row(i, j):
    return i // C == j // C


@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_its_coordinates(causal):
    order = past(N) if causal else torch.ones(N, N, dtype=torch.bool)
    for layer, line in enumerate((column, row, column)):
        agree(build(f"axial(width={C})", causal=causal, layer=layer), data(N), pairs(N, line) & order)
    cross = pairs(N, lambda i, j: column(i, j) or row(i, j)) & order
    agree(build(f"axial(width={C}, kind='cross')", causal=causal), data(N), cross)


@pytest.mark.parametrize("causal", [True, False])
def test_the_sum_is_of_two_softmaxes(causal):
    module, x, record = build(f"axial(width={C}, kind='summed')", causal=causal), data(N), {}
    order = past(N) if causal else torch.ones(N, N, dtype=torch.bool)
    qkv = tuple(heads_of(module, x, "query", "key", "value"))
    o = softmax(pairs(N, column) & order, *qkv) + softmax(pairs(N, row) & order, *qkv)
    y, _ = module(x, record=record)
    torch.testing.assert_close(y, module.out(o.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-10)
    torch.testing.assert_close(record["matrix"].sum(-1), torch.full((2, 2, N), 2.0).double())
    assert record["mask"][0, 1].equal(pairs(N, lambda i, j: column(i, j) or row(i, j)) & order)
    assert sorted(record) == ["mask", "matrix"]


def test_whole_lines_are_attention_on_reshaped_batches():
    x = data(5 * C)
    grid = x.view(2, 5, C, 6)
    for layer, lines in enumerate((grid.transpose(1, 2), grid)):
        module = build(f"axial(width={C})", causal=False, layer=layer)
        alone = lines.flatten(0, 1)
        full = torch.ones(alone.shape[1], alone.shape[1], dtype=torch.bool)
        expected = dense(module, alone, full).unflatten(0, (2, -1))
        expected = (expected if layer else expected.transpose(1, 2)).flatten(1, 2)
        torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=1e-10)
