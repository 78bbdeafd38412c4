"""Gated linear attention as the paper's equations over all pairs."""

import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import HEADS, B, N, fill, seeded
from support.tensors import merge_heads, split_heads


def test_is_the_matrix_of_all_pairs():
    """Eq. 4 of the paper: every pair of tokens with the product of the factors between them."""
    module, x = seeded("gla(rank=3, temperature=2.0, expand_k=1.0, expand_v=1.5)")
    fill(module, norm__weight=torch.linspace(0.5, 1.5, 6))
    q, k, v = (split_heads(project(x)) for project in (module.query, module.key, module.value))
    first, second = module.decay
    alpha = split_heads((x @ first.weight.T @ second.weight.T + second.bias).sigmoid() ** 0.5)
    scores = torch.zeros(B, HEADS, N, N, dtype=torch.float64)
    for i in range(N):
        for j in range(i + 1):
            scores[:, :, i, j] = (q[:, :, i] * k[:, :, j] * alpha[:, :, j + 1 : i + 1].prod(2)).sum(-1) / 2
    o = F.rms_norm(scores @ v, (6,), module.norm.weight, 1e-5)
    torch.testing.assert_close(module(x)[0], module.out(F.silu(module.out_gate(x)) * merge_heads(o)))


def test_sizes_follow_the_paper():
    module = longspan.build("gla", 64, 4)
    assert [module.key.out_features, module.value.out_features, module.decay[0].out_features] == [32, 64, 16]
