"""Ring and relay against dense attention on one graph of tokens, inputs and relay."""

from typing import Any

import pytest
import torch

import longspan
from support.tensors import data, same


def build(options="cycles=3") -> Any:
    torch.manual_seed(0)
    return longspan.build(f"star({options})", 6, 2, causal=False).double()


def update(part, nodes, allowed):
    """All nodes (M,dim) under a mask (M,M): norm(relu(out(softmax ...)))."""
    q, k, v = (p(nodes).unflatten(-1, (2, 3)).transpose(0, 1) for p in (part.query, part.key, part.value))
    p = (q @ k.mT * 3**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1)
    return part.norm(part.out((p @ v).transpose(0, 1).flatten(-2)).relu())


def definition(module, e):
    """One row e (N,dim) on 2 N + 1 nodes: tokens, inputs, relay."""
    n = len(e)
    h, s = e, e.mean(0, keepdim=True)
    ring = torch.eye(2 * n + 1, dtype=torch.bool)
    for i in range(n):
        for j in (i - 1, i + 1):
            if module.kind == "cyclic":
                ring[i, j % n] = True
            elif 0 <= j < n:
                ring[i, j] = True
        ring[i, n + i] = ring[i, 2 * n] = True
    relay = torch.eye(2 * n + 1, dtype=torch.bool)
    relay[2 * n, :n] = True
    for cycle in range(module.cycles):
        h = update(module.rings[cycle], torch.cat([h, e, s]), ring)[:n]
        if cycle < module.cycles - 1:
            s = update(module.relays[cycle], torch.cat([h, e, s]), relay)[2 * n :]
    return h


@pytest.mark.parametrize("kind", ["cyclic", "truncated"])
@pytest.mark.parametrize("n", [1, 2, 3, 11])
def test_it_equals_dense_attention_on_the_graph(n, kind):
    module, x = build(f"cycles=3, kind={kind!r}"), data(2, n, 6).requires_grad_()
    same(module(x)[0], torch.stack([definition(module, row) for row in x]), (x, *module.parameters()))


def test_the_relay_of_the_last_cycle_is_not_computed():
    assert len(build("cycles=1").relays) == 0
    assert len(build("cycles=3").relays) == 2


def test_segments_are_refused():
    with pytest.raises(ValueError, match="star does not support segments="):
        build()(data(1, 3, 6), segments=torch.zeros(1, 3, dtype=torch.long))
