"""Ring and relay against dense attention on one graph of tokens, inputs and relay."""

from typing import Any

import pytest
import torch

import longspan
from longspan.attention.star import Star
from support.hand import plain, read
from support.tensors import data, same

MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])


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


def test_by_hand():
    """All nodes tie: the mean of both neighbors, itself as token and as input, and the mean of all, 10."""
    for kind, expected in (("cyclic", [8.4, 8.4, 11.6, 11.6]), ("truncated", [6.5, 8.4, 11.6, 13.5])):
        module = plain(f"star(cycles=1, kind={kind!r})", asking=False, causal=False)
        module.rings[0].norm = torch.nn.Identity()
        assert read(module, 4.0, 8.0, 12.0, 16.0) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["cyclic", "truncated"])
@pytest.mark.parametrize("n", [1, 2, 3, 11])
def test_it_equals_dense_attention_on_the_graph(n, kind):
    module, x = build(f"cycles=3, kind={kind!r}"), data(2, n, 6).requires_grad_()
    same(module(x)[0], torch.stack([definition(module, row) for row in x]), (x, *module.parameters()))


@pytest.mark.parametrize("kind", ["cyclic", "truncated"])
def test_padding_gives_a_smaller_ring(kind):
    module, x = build(f"cycles=2, kind={kind!r}"), data(2, 11, 6)
    y = module(x, mask=MASK)[0]
    for b in range(2):
        torch.testing.assert_close(y[b, MASK[b]], definition(module, x[b, MASK[b]]), rtol=1e-10, atol=1e-10)
    two = torch.zeros_like(MASK)
    two[0, [2, 7]], two[1, 5] = True, True
    y = module(x, mask=two)[0]
    for b in range(2):
        torch.testing.assert_close(y[b, two[b]], definition(module, x[b, two[b]]), rtol=1e-10, atol=1e-10)


def test_rolling_the_input_rolls_the_output_of_a_ring():
    module, x = build(), data(2, 11, 6)
    torch.testing.assert_close(module(x.roll(4, 1))[0], module(x)[0].roll(4, 1), rtol=1e-10, atol=1e-10)
    module = build("cycles=3, kind='truncated'")
    assert (module(x.roll(4, 1))[0] - module(x)[0].roll(4, 1)).abs().max() > 1e-3


def test_without_the_ring_order_does_not_matter(monkeypatch):
    module, x, order = build(), data(2, 11, 6), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    assert (module(x[:, order])[0] - module(x)[0][:, order]).abs().max() > 1e-3
    none = torch.full((2, 11), -1)
    monkeypatch.setattr(Star, "_neighbors", lambda self, at, count: (none, none))
    torch.testing.assert_close(module(x[:, order])[0], module(x)[0][:, order], rtol=1e-10, atol=1e-10)


def test_the_relay_of_the_last_cycle_is_not_computed():
    assert len(build("cycles=1").relays) == 0
    assert len(build("cycles=3").relays) == 2


def test_segments_are_refused():
    with pytest.raises(ValueError, match="star does not support segments="):
        build()(data(1, 3, 6), segments=torch.zeros(1, 3, dtype=torch.long))
