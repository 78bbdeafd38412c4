"""The sum of a band and a low-rank part, each against the mechanism that it is alone."""

import pytest
import torch

from support.sparse import build, data, heads_of, softmax
from support.tensors import same

N = 13


def definition(module, x):
    distance = torch.arange(N)[:, None] - torch.arange(N)
    allowed = distance >= (0 if module.causal else -N)
    near = softmax(allowed & (distance.abs() < module.window), *heads_of(module, x, "query", "key", "value"))
    far = softmax(allowed, *heads_of(module, x, "far_query", "far_key", "far_value"))
    return module.out((near + far).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rank", [1, 5])
def test_it_equals_the_definition(causal, rank):
    module, x = build(f"lowrank_band(rank={rank}, window=4)", causal=causal), data(N).requires_grad_()
    same(module(x)[0], definition(module, x), (x, *module.parameters()))
