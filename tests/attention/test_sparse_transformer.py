"""Sparse transformer: strided and fixed sets equal those of the paper."""

import pytest
import torch

from support.sparse import N, agree, build, data, pairs, past


def steps(kind, size, c, n=N):
    near = {"strided": lambda i, j: i - j < size, "fixed": lambda i, j: j // size == i // size}[kind]
    far = {"strided": lambda i, j: (i - j) % size == 0, "fixed": lambda i, j: j % size >= size - c}[kind]
    return pairs(n, near) & past(n), pairs(n, far) & past(n)


options = (("strided", "block=5"), ("fixed", "block=5, summary=2"))


@pytest.mark.parametrize(("kind", "sizes"), options)
def test_it_equals_the_papers_sets(kind, sizes):
    near, far = steps(kind, 5, 2)
    spec = f"sparse_transformer(kind={kind!r}, {sizes}, integration=%r)"
    agree(build(spec % "merged"), data(), near | far)
    for layer, expected in enumerate((near, far, near)):
        agree(build(spec % "interleaved", layer=layer), data(), expected)
    agree(build(spec % "per_head"), data(), torch.stack([near, far]))


def test_summary_heads_have_different_sub_blocks():
    sees = build("sparse_transformer(kind='fixed', block=7, summary=2)", heads=8, dim=8).key_pattern.dense(N, heads=8)
    parts = ((5, 6), (3, 4), (1, 2), (5, 6))
    for head, part in enumerate(parts):
        assert sees[2 * head].equal(steps("fixed", 7, 2)[0])
        assert sees[2 * head + 1].equal(pairs(N, lambda i, j, part=part: j % 7 in part) & past())


def test_the_bidirectional_form_sees_both_sides():
    sees = build("sparse_transformer(block=5, integration='merged')", causal=False).key_pattern.dense(N)[0]
    assert sees.equal(pairs(N, lambda i, j: abs(i - j) < 5 or (i - j) % 5 == 0))
