"""The tree: every token in exactly one node, whatever the length, and attention over nodes written out one by one."""

from typing import Any

import pytest
import torch

import longspan
from longspan.ops.backends import backend
from longspan.ops.softmax import tree
from support.hand import plain, read
from support.tensors import data, same

N = 11
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
SEGMENTS = torch.tensor([[0] * 6 + [1] * 5, [2] * 11])


def build(options="k=2, levels=3", causal=True) -> Any:
    torch.manual_seed(0)
    return longspan.build(f"bp({options})", 6, 2, causal=causal).double()


def walk(i, n, k, causal):
    """(first token, end, kind's side, level, place) of all nodes that token i reads, outward one by one.

    A level's nodes are emitted until there are k of them; a node that would cover what is covered, and would do so only
    as the first of its level, gives way to its half.
    """
    nodes = []
    for side in (0,) if causal else (0, 1):
        covered, level = i + side, 0  # the border: tokens from here outward are not covered yet
        while (covered > 0) if side == 0 else (covered < n):
            size = 1 << level
            for place in range(k):
                if (covered <= 0) if side == 0 else (covered >= n):
                    break
                own = size if covered % size == 0 else size // 2
                begin = covered - own if side == 0 else covered
                assert begin % own == 0
                assert own == size or place == 0
                nodes.append((begin, min(begin + own, n), side, level, place))
                covered = begin if side == 0 else begin + own
            level += 1
    return nodes


def test_by_hand():
    """All nodes tie, and each is the mean of its tokens: the last token reads 32, 16, 4 and 8, 1 and 2."""
    module = plain("bp(k=1)", asking=False)
    for weight in (module.pool, module.edges):
        torch.nn.init.zeros_(weight)
    expected = [1.0, 1.5, 7 / 3, (8 + 4 + 1.5) / 3, (16 + 8 + 4 + 1.5) / 4, (32 + 16 + 6 + 1.5) / 4]
    assert read(module, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0) == pytest.approx(expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_each_token_is_in_exactly_one_node(k, causal):
    for n in [*range(1, 67), 127, 128, 129, 251]:
        levels = tree.depth(n, k)
        at, total = torch.arange(n)[None], torch.tensor([n])
        level, index, there = tree.cover(at, total, k, levels, causal=causal)
        assert level.shape == (1, n, 1 + k * levels * (1 if causal else 2))
        begin, end = index << level, (index + 1 << level).clamp(max=n)
        tokens = torch.arange(n)
        holds = (begin[..., None] <= tokens) & (tokens < end[..., None]) & there[..., None]
        wanted = torch.ones(n, n, dtype=torch.long)
        assert torch.equal(holds.sum(2)[0], wanted.tril() if causal else wanted)
        if causal:  # spans of the past end there
            assert (end <= at[..., None])[..., 1:][there[..., 1:]].all()
        assert levels <= max(1, (2 * n // k).bit_length()) + 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_nodes_are_those_of_a_walk_outward(k, causal):
    for n in (1, 2, 7, 16, 23):
        levels = tree.depth(n, k)
        level, index, there = tree.cover(torch.arange(n)[None], torch.tensor([n]), k, levels, causal=causal)
        for i in range(n):
            found = [
                (int(m) << int(s), min(int(m + 1) << int(s), n))
                for s, m in zip(level[0, i][there[0, i]], index[0, i][there[0, i]], strict=True)
            ]
            assert found == [(i, i + 1)] + [node[:2] for node in walk(i, n, k, causal)]


def definition(module, x):
    """One sequence x (n,dim): every node's key and value from its tokens, every edge by itself."""
    n, k, levels = len(x), module.k, module.levels
    q, key, v = (part(x).unflatten(-1, (2, 3)).transpose(0, 1) for part in (module.query, module.key, module.value))
    pool = (key @ module.pool[..., None])[..., 0] * 3**-0.5
    outs = []
    for i in range(n):
        nodes = [(i, i + 1, 0)]
        for begin, end, side, level, place in walk(i, n, k, module.causal):
            nodes.append((begin, end, 1 + (side * levels + min(level, levels - 1)) * k + place))
        share = [pool[:, None, b:e].softmax(-1) for b, e, _ in nodes]
        keys = torch.cat([s @ key[:, b:e] for s, (b, e, _) in zip(share, nodes, strict=True)], 1)
        values = torch.cat([s @ v[:, b:e] for s, (b, e, _) in zip(share, nodes, strict=True)], 1)
        keys = keys + module.edges[[kind for _, _, kind in nodes]]
        outs.append(((q[:, i, None] @ keys.mT * 3**-0.5).softmax(-1) @ values)[:, 0].flatten())
    return module.out(torch.stack(outs))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", ["k=1, levels=2", "k=2, levels=9", "k=3, levels=1"])
def test_it_equals_the_definition(options, causal):
    module = build(options, causal)
    for arguments in ({}, {"mask": MASK, "segments": SEGMENTS}):
        x = data(2, N, 6).requires_grad_()
        real = arguments.get("mask", torch.ones_like(MASK))
        ids = arguments.get("segments", torch.zeros_like(SEGMENTS))
        expected = torch.zeros(2, N, 6, dtype=torch.float64)
        for b in range(2):
            for name in ids[b].unique():
                own = real[b] & (ids[b] == name)
                expected[b, own] = definition(module, x[b, own])
        for name in ("torch", "reference"):
            with backend(name):
                found = module(x, **arguments)[0]
            same(found[real], expected[real], (x, *module.parameters()))
            assert not found[~real].any()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_steps_and_cuts_of_a_long_sequence_agree(k):
    module, x = build(f"k={k}"), data(1, 103, 6)
    whole = module(x)[0]
    with torch.no_grad():
        for cuts in ([1] * 103, [3, 31, 1, 17, 51]):
            state, outs = module.init_state(1), []
            for part in x.split(cuts, 1):
                y, state = module(part, state)
                outs.append(y)
            torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-10, atol=1e-10)


def test_the_state_holds_the_last_whole_spans():
    module, x = build("k=2"), data(1, 13, 6)
    _, state = module(x, module.init_state(1))
    assert state.keys.shape == (1, 2, tree.LEVELS, 4, 3)
    assert longspan.states.nbytes(state) == longspan.states.nbytes(module.init_state(1))
    v = module.value(x)[0].unflatten(-1, (2, 3)).transpose(0, 1)
    pool = (module.key(x)[0].unflatten(-1, (2, 3)).transpose(0, 1) * module.pool[:, None]).sum(-1) * 3**-0.5
    for level in range(3):
        size = 1 << level
        whole = 13 // size
        for slot, m in enumerate(range(whole - 4, whole)):
            if m < 0:
                assert (state.weights[0, :, level, slot] == tree.EMPTY).all()
                continue
            tokens = slice(m * size, (m + 1) * size)
            mean = (pool[:, tokens].softmax(-1)[..., None] * v[:, tokens]).sum(1)
            torch.testing.assert_close(state.values[0, :, level, slot], mean)
            torch.testing.assert_close(state.weights[0, :, level, slot], pool[:, tokens].logsumexp(-1))


def test_kinds_differ_by_level_side_and_place():
    assert tree.kinds(2, 3, 2, causal=True).tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert tree.kinds(1, 3, 2, causal=False).tolist() == [0, 1, 2, 2, 3, 4, 4]
    assert build("k=2, levels=3").edges.shape == (7, 3)
    assert build("k=2, levels=3", causal=False).edges.shape == (13, 3)


def test_a_state_has_an_end():
    module = build()
    state = module.init_state(1)
    state = state._replace(position=torch.tensor([2**tree.LEVELS - 1]))
    module(data(1, 1, 6), state)
    with pytest.raises(ValueError, match=r"2\^24 tokens.*16777217"):
        module(data(1, 2, 6), state)
