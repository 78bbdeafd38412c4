"""Improved clustered attention, worked out by hand; its laws and identities are in test_clustered.py."""

import math

import pytest
import torch

import longspan


def test_by_hand():
    """One cluster of the queries 0, ln 2 and 2 ln 2: their mean weighs the keys 0, 1, 2 with 1/7, 2/7 and 4/7.

    The two best keys have 6/7, which each query shares out anew: 1 to 1, 1 to 2 and 1 to 4. Key 0 reads nothing.
    """
    module = longspan.build("improved_clustered(clusters=1, topk=2)", 1, 1, causal=False).double()
    with torch.no_grad():
        for part in (module.query, module.key, module.value, module.out):
            part.weight.fill_(1.0)
            part.bias.zero_()
        module.query.weight.fill_(math.log(2))
    y, _ = module(torch.tensor([[[0.0], [1.0], [2.0]]]).double())
    assert y.flatten().tolist() == pytest.approx([9 / 7, 10 / 7, 54 / 35], rel=1e-12)
