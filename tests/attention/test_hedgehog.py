"""Hedgehog against its definition, pair by pair."""

import math
from typing import Any

import pytest
import torch

import longspan
from longspan.attention import hedgehog
from longspan.modules.rotary import rotate
from longspan.ops.tensors import split
from support.hand import plain, read
from support.tensors import data, same

N = 13
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 8, [False] + [True] * 12])
SEGMENTS = torch.tensor([[0] * 5 + [1] * 8, [2] * 13])


def build(spec, causal=True) -> Any:
    """With maps and gates that differ from their first values."""
    torch.manual_seed(0)
    module: Any = longspan.build(spec, 8, 2, causal=causal).double()
    with torch.no_grad():
        for p in (module.query_map, module.key_map, *([module.gate] if module.window else [])):
            p.add_(0.5 * torch.randn_like(p))
    return module


def definition(module, x, mask, segments):
    """The outputs at real tokens, from the matrix of all pairs."""
    same_row = mask[:, None, :] & (segments[:, :, None] == segments[:, None, :])
    # Positions count the real tokens of a segment.
    before = (same_row & torch.ones(N, N, dtype=torch.bool).tril(-1)).sum(-1)
    q, k, v = (split(part(x), 2) for part in (module.query, module.key, module.value))
    if module.rotary:
        q, k = (rotate(t, before, module.rotary) for t in (q, k))

    def features(t, maps):
        y = torch.einsum("hfd,bhnd->bhnf", maps, t)
        return torch.cat([y, -y], -1).softmax(-1)

    weights = features(q, module.query_map) @ features(k, module.key_map).mT
    allowed = same_row & torch.ones(N, N, dtype=torch.bool).tril() if module.causal else same_row
    if module.window:
        distance = before[:, :, None] - before[:, None, :]
        near = (allowed & (distance.abs() < module.window))[:, None]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~near, -torch.inf)
        peak = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights = torch.where(near, module.gate.exp()[:, None, None] * (scores - peak).exp(), weights)
    weights = weights * allowed[:, None]
    # A masked query reads nothing.
    eps = (~mask)[:, None, :, None].double() if module.window else module.eps
    o = weights @ v / (weights.sum(-1, keepdim=True) + eps)
    return module.out(o.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        ("hedgehog", True),
        ("hedgehog", False),
        ("hedgehog(rotary=10.0)", True),
        ("hedgehog(window=1)", True),
        ("hedgehog(window=4, rotary=10.0)", True),
        ("hedgehog(window=20)", True),
        ("hedgehog(window=1)", False),
        ("hedgehog(window=3, rotary=10.0)", False),
        ("hedgehog(window=20)", False),
    ],
)
def test_it_equals_the_definition(spec, causal):
    module, everything = build(spec, causal), torch.ones_like(MASK)
    for arguments in ({}, {"mask": MASK}, {"segments": SEGMENTS}):
        x = data(2, N, 8).requires_grad_()
        mask, segments = arguments.get("mask", everything), arguments.get("segments", torch.zeros_like(SEGMENTS))
        found, expected = module(x, **arguments)[0][mask], definition(module, x, mask, segments)[mask]
        same(found, expected, (x, *module.parameters()))


def test_by_hand():
    """One channel, whose two features are p and 1 - p with p = 1 / (1 + e^(-2x))."""
    p = [1 / (1 + math.exp(-2 * x)) for x in (1.0, -1.0, 0.5)]
    weights = [p[2] * other + (1 - p[2]) * (1 - other) for other in p]
    expected = sum(w * x for w, x in zip(weights, (1.0, -1.0, 0.5), strict=True)) / sum(weights)
    assert read(plain("hedgehog(eps=0.0)"), 1.0, -1.0, 0.5)[2] == pytest.approx(expected)
    # In the window the scores of the last token are -0.5 and 0.25, which is the largest.
    near = [math.exp(-0.75), 1.0]
    expected = (weights[0] - near[0] + 0.5) / (weights[0] + sum(near))
    assert read(plain("hedgehog(window=2)"), 1.0, -1.0, 0.5)[2] == pytest.approx(expected)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_all_tokens_is_softmax(causal):
    module: Any = build("hedgehog(window=40, rotary=100.0)", causal)
    softmax = longspan.build("softmax(rotary=100.0)", 8, 2, causal=causal).double()
    softmax.load_state_dict({name: p for name, p in module.state_dict().items() if name in softmax.state_dict()})
    x = data(2, N, 8)
    torch.testing.assert_close(module(x)[0], softmax(x)[0], rtol=1e-10, atol=1e-10)


def test_long_rows_are_read_in_blocks():
    """Whole rows of several blocks of queries, and single steps."""
    module, x = build("hedgehog(window=3)"), data(1, 101, 8)
    y, state = module(x, module.init_state(1))
    steps, at = [], module.init_state(1)
    for token in x.split(1, 1):
        one, at = module(token, at)
        steps.append(one)
    for found in (torch.cat(steps, 1), module(x)[0]):
        torch.testing.assert_close(found, y, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(state, at, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [31, 33, 101])
def test_both_sides_are_read_in_blocks(n):
    """A row of several blocks of queries against the same row in one."""
    module, x = build("hedgehog(window=3)", causal=False), data(1, n, 8)
    q, k, v = module._projected(x, torch.arange(n)[None])
    features = [hedgehog._features(t, maps) for t, maps in ((q, module.query_map), (k, module.key_map))]
    place = torch.arange(n)
    near = (place[:, None] - place).abs() < 3
    scores = (q @ k.mT / 2).masked_fill(~near, -torch.inf)
    gate = module.gate.exp()[:, None, None]
    weights = torch.where(near, gate * (scores - scores.amax(-1, keepdim=True)).exp(), features[0] @ features[1].mT)
    expected = module.out((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x)[0], expected, rtol=1e-10, atol=1e-10)
