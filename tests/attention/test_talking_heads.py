"""Talking heads against loops, against softmax without mixing, and the sums of rows."""

import math

import pytest
import torch

import longspan
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from support.tensors import data

HEADS = 3
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 7, [2] * 11])


def build(before=None, after=None, causal=True):
    """Talking heads with these mixtures, random ones by default."""
    torch.manual_seed(0)
    module = longspan.build("talking_heads", 6, HEADS, causal=causal).double()
    with torch.no_grad():
        module.mix_scores.copy_(data(HEADS, HEADS, seed=1) if before is None else before)
        module.mix_weights.copy_(data(HEADS, HEADS, seed=2) if after is None else after)
    return module


def softmax(module, causal=True):
    """Softmax attention with the same projections."""
    other = longspan.build("softmax", 6, HEADS, causal=causal).double()
    other.load_state_dict({name: w for name, w in module.state_dict().items() if not name.startswith("mix")})
    return other


@torch.no_grad()
def loops(module, x, allowed):
    """The equations, sum by sum: x (B,N,dim), allowed (B,N,N) -> (B,N,dim)."""
    q, k, v = (part(x).unflatten(-1, (HEADS, -1)) for part in (module.query, module.key, module.value))
    out, heads = torch.zeros_like(v), range(HEADS)
    for b, row in enumerate(allowed.tolist()):
        for i, sees in enumerate(row):
            keys = [j for j, seen in enumerate(sees) if seen]
            if not keys:
                continue
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
    for arguments in ({}, {"mask": MASK}, {"segments": SEGMENTS}):
        allowed = torch.ones(2, 11, 11, dtype=torch.bool)
        allowed = allowed.tril() if causal else allowed
        if "mask" in arguments:
            allowed = allowed & MASK[:, None, :]
        if "segments" in arguments:
            allowed = allowed & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
        real = arguments.get("mask", torch.ones_like(MASK))
        found = module(x, **arguments)[0]
        torch.testing.assert_close(found[real], loops(module, x, allowed)[real], rtol=1e-10, atol=1e-10)


def test_by_hand():
    """Two heads of one channel, whose scores 0 and ln 3 are swapped, and whose weights are added and subtracted."""
    module = longspan.build("talking_heads", 2, 2).double()
    with torch.no_grad():
        for part in (module.query, module.key, module.value, module.out):
            part.weight.copy_(torch.eye(2))
            part.bias.zero_()
        module.query.weight.copy_(torch.diag(torch.tensor([0.0, math.log(3)], dtype=torch.float64)))
        module.mix_scores.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        module.mix_weights.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    # The second token's scores of the keys 0 and 1: zero in head 0, (0, ln 3) in head 1. Swapped, weights (1/4, 3/4)
    # in head 0 and (1/2, 1/2) in head 1; their sum is (3/4, 5/4), their difference (-1/4, 1/4). Values are the keys.
    y, _ = module(torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]).double())
    torch.testing.assert_close(y[0, 1], torch.tensor([5 / 4, 1 / 4]).double(), rtol=1e-12, atol=1e-12)


def test_a_permutation_of_scores_permutes_queries_and_keys():
    """Head g has the weights of head order[g], and its own values."""
    order = torch.tensor([2, 0, 1])
    module, x = build(torch.eye(HEADS)[:, order], torch.eye(HEADS)), data(2, 11, 6)
    other = softmax(module)
    with torch.no_grad():
        for part in (other.query, other.key):
            part.weight.copy_(part.weight.unflatten(0, (HEADS, -1))[order].flatten(0, 1))
            part.bias.copy_(part.bias.unflatten(0, (HEADS, -1))[order].flatten(0, 1))
    torch.testing.assert_close(module(x)[0], other(x)[0], rtol=1e-10, atol=1e-10)


def test_rows_sum_to_the_columns_of_the_mixture_of_weights():
    module, record = build(), {}
    module(data(2, 11, 6), record=record)
    sums = module.mix_weights.sum(0)[:, None].expand(2, HEADS, 11)
    torch.testing.assert_close(record["matrix"].sum(-1), sums, rtol=1e-12, atol=1e-12)
    assert (record["matrix"] < 0).any()


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
