"""The sum of a band and a low-rank part, each against the mechanism that it is alone."""

from typing import Any

import pytest
import torch

import longspan
from support.tensors import data, same

N = 13


def build(causal=True, rank=2, window=4) -> Any:
    torch.manual_seed(0)
    return longspan.build(f"lowrank_band(rank={rank}, window={window})", 6, 2, causal=causal).double()


def project(module, x, *names):
    return (getattr(module, name)(x).unflatten(-1, (2, -1)).transpose(1, 2) for name in names)


def dense(q, k, v, allowed):
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


def definition(module, x):
    distance = torch.arange(N)[:, None] - torch.arange(N)
    allowed = distance >= (0 if module.causal else -N)
    near = allowed & (distance.abs() < module.window)
    q, k, v = project(module, x, "query", "key", "value")
    far_q, far_k, far_v = project(module, x, "far_query", "far_key", "far_value")
    o = dense(q, k, v, near) + dense(far_q, far_k, far_v, allowed)
    return module.out(o.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rank", [1, 5])
def test_it_equals_the_definition(causal, rank):
    module, x = build(causal, rank), data(2, N, 6).requires_grad_()
    same(module(x)[0], definition(module, x), (x, *module.parameters()))
