"""The tree: every token in exactly one node, whatever the length, and attention over nodes written out one by one."""

from typing import Any

import pytest
import torch

import longspan
from longspan.ops.softmax import tree
from support.tensors import data, same

N = 11


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_nodes_are_those_of_a_walk_outward(k, causal):
    for n in (1, 2, 7, 16, 23, 66, 129):
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
    module, x = build(options, causal), data(2, N, 6).requires_grad_()
    same(module(x)[0], torch.stack([definition(module, row) for row in x]), (x, *module.parameters()))


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
