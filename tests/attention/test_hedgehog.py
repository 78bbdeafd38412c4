"""Hedgehog against its definition, pair by pair."""

from typing import Any

import pytest
import torch

import longspan
from longspan.modules.rotary import rotate
from longspan.ops.tensors import split
from support.sparse import past
from support.tensors import data, same

N = 13


def build(spec, causal=True) -> Any:
    """With maps and gates that differ from their first values."""
    torch.manual_seed(0)
    module: Any = longspan.build(spec, 8, 2, causal=causal).double()
    with torch.no_grad():
        for p in (module.query_map, module.key_map, *([module.gate] if module.window else [])):
            p.add_(0.5 * torch.randn_like(p))
    return module


def definition(module, x):
    """The outputs, from the matrix of all pairs."""
    at = torch.arange(N).expand(len(x), -1)
    q, k, v = (split(part(x), 2) for part in (module.query, module.key, module.value))
    if module.rotary:
        q, k = (rotate(t, at, module.rotary) for t in (q, k))

    def features(t, maps):
        y = torch.einsum("hfd,bhnd->bhnf", maps, t)
        return torch.cat([y, -y], -1).softmax(-1)

    weights = features(q, module.query_map) @ features(k, module.key_map).mT
    allowed = past(N) if module.causal else torch.ones(N, N, dtype=torch.bool)
    if module.window:
        near = allowed & ((at[0, :, None] - at[0]).abs() < module.window)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~near, -torch.inf)
        scores = scores - scores.amax(-1, keepdim=True)
        weights = torch.where(near, module.gate.exp()[:, None, None] * scores.exp(), weights)
    weights = weights * allowed
    o = weights @ v / (weights.sum(-1, keepdim=True) + (0.0 if module.window else module.eps))
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
    module, x = build(spec, causal), data(2, N, 8).requires_grad_()
    same(module(x)[0], definition(module, x), (x, *module.parameters()))
