"""Informer's attention against its definition, the leak of the published form, and that the default has none."""

import math

import pytest
import torch

import longspan
from longspan.ops.compress import probsparse
from support.sparse import build, data, heads_of, past, softmax
from support.tensors import same

N = 29
BOTH = pytest.mark.parametrize("causal", [True, False])
MASK = torch.rand(2, N, generator=torch.Generator().manual_seed(3)) < 0.7


def definition(module, x, active):
    """Softmax rows where queries are active, and a mean elsewhere, or in the published form a sum."""
    n, (q, k, v) = x.shape[1], heads_of(module, x, "query", "key", "value")
    allowed = past(n) if module.causal else torch.ones(n, n, dtype=torch.bool)
    even = allowed.double() / (1 if module.published else allowed.sum(-1, keepdim=True))
    o = torch.where(active[..., None], softmax(allowed, q, k, v), even @ v)
    return module.out(o.transpose(1, 2).flatten(-2))


def measured(module, x):
    """Query by query, over the keys that it draws."""
    q, k = heads_of(module, x, "query", "key")
    n, scores = x.shape[1], q @ k.mT * q.shape[-1] ** -0.5
    found = torch.zeros(scores.shape[:3], dtype=torch.float64)
    for i in range(n):
        tokens = i + 1 if module.causal and not module.published else n
        drawn = []
        for draw in range(probsparse.most(tokens, module.factor)):
            place = torch.tensor([[i]]), torch.tensor([[tokens]])
            key, there = probsparse.sample(draw, *place, module.factor, module.layer)
            assert bool(there)
            drawn.append(int(key))
        assert len(set(drawn)) == len(drawn)
        assert 0 <= min(drawn)
        assert max(drawn) < tokens
        found[..., i] = scores[:, :, i, drawn].amax(-1) - scores[:, :, i, drawn].mean(-1)
    return found


def chosen(module, scores):
    """One query after the other."""
    n, active = scores.shape[-1], torch.zeros(scores.shape, dtype=torch.bool)
    for i in range(n):
        if module.causal and not module.published:
            larger = (scores[..., :i] >= scores[..., i : i + 1]).sum(-1)
            active[..., i] = larger < probsparse.most(i + 1, module.factor)
        else:
            larger = (scores > scores[..., i : i + 1]).sum(-1) + (scores[..., :i] == scores[..., i : i + 1]).sum(-1)
            active[..., i] = larger < probsparse.most(n, module.factor)
    return active


FORMS = pytest.mark.parametrize(
    ("options", "causal"),
    [("", True), ("", False), (", published=True", True)],
    ids=["causal", "bidirectional", "leaky"],
)


@FORMS
@pytest.mark.parametrize(("factor", "n"), [(1, 1), (3, 2), (2, 7), (1, N), (2, 70)])
def test_it_equals_the_definition(options, causal, factor, n):
    module, x = build(f"informer(factor={factor}{options})", causal=causal), data(n).requires_grad_()
    active = chosen(module, measured(module, x))
    assert torch.equal(module.active(x), active)
    found, expected = module(x)[0], definition(module, x, active)
    same(found, expected, (x, *module.parameters()))
    with longspan.backend("reference"):
        torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=1e-10)


def test_the_matrix_of_a_later_call_begins_with_the_slots():
    module, x, record = build("informer(factor=1)"), data(N), {}
    whole: dict = {}
    module(x, record=whole)
    _, state = module(x[:, :11], module.init_state(2))
    module(x[:, 11:], state, record=record)
    torch.testing.assert_close(record["matrix"], whole["matrix"][:, :, 11:], rtol=0, atol=1e-10)
    assert torch.equal(record["mask"].expand(2, 1, -1, -1), whole["mask"][:, :, 11:].expand(2, 1, -1, -1))


@BOTH
def test_if_all_keys_are_drawn_the_layer_does_not_matter(causal):
    """The layer seeds the sampling. Draws are as many as keys up to 4 tokens, and for larger factors."""
    x = data(N)
    for factor, equal in ((1, False), (N, True)):
        q, k = heads_of(build("informer", causal=causal), x, "query", "key")
        at = torch.arange(N)[None]
        tokens = at + 1 if causal else torch.full_like(at, N)
        scores = [probsparse.measure(q, k, at, tokens, factor=factor, layer=layer) for layer in (0, 1)]
        assert torch.allclose(*scores, rtol=0, atol=1e-12) is equal


@FORMS
def test_padding_where_a_compiler_traces(options, causal, monkeypatch):
    monkeypatch.setattr("longspan.ops.rows.followed", lambda: True)
    module, x = build(f"informer(factor=1{options})", causal=causal), data(N)
    y = module(x, mask=MASK)[0]
    for row in range(2):
        alone = module(x[row : row + 1, MASK[row]])[0]
        torch.testing.assert_close(y[row : row + 1, MASK[row]], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("factor", [1, 5])
def test_measures_in_random_order_make_as_many_queries_active_as_documented(factor):
    n = 1024
    scores = torch.rand(200, 2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    active = probsparse.among_earlier(scores, torch.arange(n)[None], None, None, factor).double().sum(-1).mean()
    # L = 1, whose logarithm is 0, has one active query.
    expected = sum(min(1.0, max(factor * math.ceil(math.log(many)), 1) / many) for many in range(1, n + 1))
    assert active.item() == pytest.approx(expected, abs=1.0)
    if factor == 5:
        assert f"{expected:.0f} of {n}" in " ".join((longspan.attention.informer.Informer.__doc__ or "").split())


def test_more_queries_are_active_since_later_measures_are_larger():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = longspan.build("informer", 32, 4).double()
    x = torch.randn(8, 1024, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        active = module.active(x).double().sum(-1).mean().item()
    assert active == pytest.approx(150, abs=5)
    assert "about 150 of 1024" in " ".join((longspan.attention.informer.Informer.__doc__ or "").split())


@pytest.mark.parametrize("n", [0, 1, 2, 3, 17, 64, 100])
def test_earlier_ones_are_counted(n):
    x = torch.randint(9, (2, 3, n), generator=torch.Generator().manual_seed(1)).double()  # many are equal
    expected = torch.tensor(
        [[[sum(row[j] >= row[i] for j in range(i)) for i in range(n)] for row in rows] for rows in x.tolist()]
    ).view(2, 3, n)
    assert torch.equal(probsparse.earlier(x), expected.long())


def test_earlier_calls_count_by_sorting_and_without(monkeypatch):
    x = torch.randint(9, (2, 3, 40), generator=torch.Generator().manual_seed(1)).double()
    whole = probsparse.among_earlier(x, torch.arange(40)[None], None, None, 1)
    for at_most in (0, 64):
        monkeypatch.setattr(probsparse, "MAX_UNSORTED", at_most)
        place = torch.arange(25, 40)[None]
        # Slots beyond those in use hold anything.
        held = torch.cat([x[..., :25], torch.full((2, 3, 5), 99.0, dtype=torch.float64)], -1)
        found = probsparse.among_earlier(x[..., 25:], place, held, torch.tensor([25, 25]), 1)
        assert torch.equal(found, whole[..., 25:])


def test_counts_are_those_of_the_paper():
    assert [probsparse.most(n, 5) for n in (0, 1, 2, 5, 20, 21, 96, 10_000)] == [0, 1, 2, 5, 15, 20, 25, 50]
    numbers = torch.arange(3000)
    assert probsparse.counts(numbers, 3).tolist() == [probsparse.most(n, 3) for n in range(3000)]
    assert math.ceil(math.log(96)) == 5


def test_the_published_form_has_no_matrix():
    module, x = build("informer(published=True)"), data(N)
    with pytest.raises(ValueError, match="published=True has no attention matrix"):
        module(x, record={})
