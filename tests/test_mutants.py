"""Planted bugs, each of which at least one law must catch: the worth of the battery."""

import pytest
import torch

from longspan import cache, checks
from longspan.attention import linear as linear_module
from longspan.cache import Sight
from longspan.layers import positions
from longspan.ops import linear, recurrence, softmax


def leaky_scan(products, borders):
    return products.tril_(1) if borders is None else products.tril_(1).mul_(borders.same)


def leaky_softmax(q, k, v, *, mask=None, causal=False, dropout=0.0, original=softmax.attend):
    if causal:
        mask, causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1), False
    return original(q, k, v, mask=mask, causal=causal, dropout=dropout)


def no_padding_in_sums(q, k, v, causal, real, segments, state, donate, original=linear._sum):
    return original(q, k, v, causal, None, segments, state, donate)


def no_padding_in_sight(k, v, *, causal, mask=None, segments=None, original=cache.look):
    return original(k, v, causal=causal, segments=segments)


def step_in_place(q, k, v, state, *, donate=False, original=recurrence.step):
    return original(q, k, v, state.detach(), donate=True)


def cache_in_place(cache_, k, v, used, donate, original=cache._extend_even):
    with torch.no_grad():
        return original(cache_, k, v, used, True)


def mean_instead_of_normaliser(read, eps):
    return read[..., :-1] / (read[..., -1:].mean(-2, keepdim=True) + eps)


def forgotten_past(q, k, allowed, *, eps, state=None, numerator=None, original=linear.matrix):
    return original(q, k, allowed, eps=0.1, state=state, numerator=numerator)


def last_token_unwritten(q, k, v, state=None, *, segments=None, chunk=64, donate=False, original=recurrence.scan):
    out, after = original(q, k, v, state, segments=segments, chunk=chunk)
    if q.shape[2] > 1:
        after = original(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], state, chunk=chunk)[1]
    return out, after


def positions_from_one(x, start=None, *, mask=None, segments=None, original=positions):
    at, end = original(x, start, mask=mask, segments=segments)
    return at, end + (0 if start is None else 1)


def cache_one_short(cache_, k, v, used, donate, original=cache._extend_even):
    sight, added = original(cache_, k, v, used, donate)
    return sight, added._replace(length=added.length - (1 if k.shape[2] > 1 else 0))


def blind_to_itself(cache_, k, v, used, donate, original=cache._extend_even):
    sight, added = original(cache_, k, v, used, donate)
    return (
        Sight(sight.keys[:, :, :-1], sight.values[:, :, :-1], None, False) if used and k.shape[2] == 1 else sight
    ), added


CUT = "parallel_is_recurrent"
MUTANTS = {
    "a leaky mask in the scan": (recurrence, "_masked", leaky_scan, "linear", "causal"),
    "a leaky mask in softmax": (softmax, "attend", leaky_softmax, "softmax", "causal"),
    "a dropped padding mask in the sums": (linear, "_sum", no_padding_in_sums, "linear", "padding"),
    "a dropped padding mask in softmax": (cache, "look", no_padding_in_sight, "softmax", "padding"),
    "a state changed in place by a step": (recurrence, "step", step_in_place, "linear", "state"),
    "a cache changed in place": (cache, "_extend_even", cache_in_place, "softmax", "state"),
    "a wrong normaliser": (linear, "normalise", mean_instead_of_normaliser, "linear", "attention_matrix"),
    "a wrong eps in the matrix": (linear, "matrix", forgotten_past, "linear", "attention_matrix"),
    "a prefill that forgets its last token": (recurrence, "scan", last_token_unwritten, "linear", CUT),
    "a prefill one position off": (linear_module, "positions", positions_from_one, "linear(rotary=100.0)", CUT),
    "a cache one slot short": (cache, "_extend_even", cache_one_short, "softmax", CUT),
    "a step blind to its own token": (cache, "_extend_even", blind_to_itself, "softmax", CUT),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_law_catches(mutant, monkeypatch):
    module, name, replacement, spec, law = MUTANTS[mutant]
    assert checks.check(law, spec).status == "passed"
    monkeypatch.setattr(module, name, replacement)
    assert checks.check(law, spec).status == "failed"
