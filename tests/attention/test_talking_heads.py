"""Talking heads against loops, against softmax without mixing, and the sums of rows."""

import math

import pytest
import torch

import longspan
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from support.tensors import data

HEADS = 3


def build(before=None, after=None, causal=True):
    """Talking heads with these mixtures, random ones by default."""
    torch.manual_seed(0)
    module = longspan.build("talking_heads", 6, HEADS, causal=causal).double()
    with torch.no_grad():
        module.mix_scores.copy_(data(HEADS, HEADS, seed=1) if before is None else before)
        module.mix_weights.copy_(data(HEADS, HEADS, seed=2) if after is None else after)
    return module


@torch.no_grad()
def loops(module, x):
    """The equations, sum by sum: x (B,N,dim) -> (B,N,dim)."""
    q, k, v = (part(x).unflatten(-1, (HEADS, -1)) for part in (module.query, module.key, module.value))
    out, heads = torch.zeros_like(v), range(HEADS)
    for b in range(len(x)):
        for i in range(x.shape[1]):
            keys = range(i + 1 if module.causal else x.shape[1])
            scores = {(h, j): float(q[b, i, h] @ k[b, j, h]) / math.sqrt(v.shape[-1]) for h in heads for j in keys}
            weights = {}
            for g in heads:
                mixed = {j: sum(scores[h, j] * float(module.mix_scores[h, g]) for h in heads) for j in keys}
                total = sum(math.exp(score) for score in mixed.values())
                weights |= {(g, j): math.exp(score) / total for j, score in mixed.items()}
            for g in heads:
                for j in keys:
                    weight = sum(weights[h, j] * float(module.mix_weights[h, g]) for h in heads)
                    out[b, i, g] += weight * v[b, j, g]
    return module.out(out.flatten(-2))


@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_loops(causal):
    module, x = build(causal=causal), data(2, 11, 6)
    torch.testing.assert_close(module(x)[0], loops(module, x), rtol=1e-10, atol=1e-10)


def test_a_query_that_sees_nothing_gets_zero():
    module, seen = build(), torch.tensor([[False] * 7, [True] * 7])
    y, _ = module(data(2, 11, 6), context=data(2, 7, 6, seed=3), context_mask=seen)
    torch.testing.assert_close(y[0], module.out.bias.expand(11, -1), rtol=0, atol=0)
    assert (y[1] - module.out.bias).abs().max() > 1e-3


def test_a_new_model_begins_near_softmax():
    """A model initializes its linear layers with small weights, but not the mixtures."""
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(dim=12, depth=2, heads=3, attention="talking_heads", feedforward=8, vocab=5, length=7)
    )
    for attention in model.stack.attentions():
        for mixture in (attention.mix_scores, attention.mix_weights):
            assert 0 < (mixture - torch.eye(3)).abs().max() < 0.1


def test_an_unsupported_backend_is_refused():
    with longspan.backend("native"), pytest.raises(ValueError, match="'native'.*written-out scores"):
        build()(data(2, 5, 6))
