"""Softmax over scores of content and distance, pair by pair: one score for each mechanism, and what follows from it."""

import math

import pytest
import torch

import longspan
from longspan.attention import alibi
from support.tensors import close, data, merge_heads, split_heads

N, DIM = 11, 8


def score_alibi(module, h, query, key, i, j, seen, whole):
    return query @ key / math.sqrt(len(query)) - alibi.slopes(module.heads)[h] * abs(i - j)


def score_gaussian(module, h, query, key, i, j, seen, whole):
    """G_ij from the query of all heads and the number of tokens that it sees."""
    content = query @ key / math.sqrt(len(query))
    if module.kind == "fixed":
        return content - abs(module.w[h] * (i - j) ** 2 + module.b[h])
    hidden = (module.hidden.weight @ whole).tanh()
    place, width = (seen * (weight[h] @ hidden).sigmoid() for weight in (module.centre.weight, module.width.weight))
    return content - (j - place) ** 2 / (2 * (width / 2) ** 2)


def score_relative(module, h, query, key, i, j, seen, whole):
    size, d = len(query), i - j
    d = max(-module.clamp, min(module.clamp, d)) if module.clamp else d
    angles = [d / 10000 ** (2 * (c // 2) / module.dim) for c in range(module.dim)]
    wave = query.new_tensor([math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(angles)])
    distance = module.distance.weight[h * size : (h + 1) * size] @ wave
    return ((query + module.u[h]) @ key + (query + module.v[h]) @ distance) / math.sqrt(size)


SCORES = {
    "alibi": score_alibi,
    "gaussian(kind='learned')": score_gaussian,
    "gaussian(kind='fixed')": score_gaussian,
    "relative": score_relative,
    "relative(clamp=3)": score_relative,
}


def build(spec, causal=True):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = longspan.build(spec, DIM, 2, causal=causal).double()
        for name in ("u", "v"):
            if hasattr(module, name):
                torch.nn.init.normal_(getattr(module, name))
        return module


@torch.no_grad()
def quadratic(module, score, x):
    """x (B,N,dim) -> (B,N,dim), one pair after the other."""
    queries = module.query(x)
    q, k, v = (split_heads(t) for t in (queries, module.key(x), module.value(x)))
    out = torch.zeros_like(v)
    for b, i in torch.cartesian_prod(torch.arange(len(x)), torch.arange(x.shape[1])).tolist():
        keys = list(range(i + 1 if module.causal else x.shape[1]))
        for h in range(module.heads):
            scores = [score(module, h, q[b, h, i], k[b, h, j], i, j, len(keys), queries[b, i]) for j in keys]
            out[b, h, i] = torch.stack(scores).softmax(0) @ v[b, h, keys]
    return module.out(merge_heads(out))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SCORES)
def test_outputs_equal_the_sums_over_pairs(spec, causal):
    module, x = build(spec, causal), data(2, N, DIM)
    close(module(x)[0], quadratic(module, SCORES[spec], x))
