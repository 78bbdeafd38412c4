"""The experiments on random features and on capacity: their parts obey the laws that they stand on."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from longspan.ops.linear import random_features
from longspan_lab.experiments import approximation, capacity, retrieval
from support.experiments import NOWHERE


def numbers(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Retrieval


def test_the_answer_is_the_value_that_came_last():
    sequences = retrieval.Sequences(torch.tensor([[2, 0, 2, 1]]), torch.tensor([[3, 1, 0, 2]]))
    assert retrieval.answers(sequences, 4).tolist() == [[1, 2, 0, -1]]


def test_without_replacement_nothing_comes_twice():
    keys, values = retrieval.draw(5, 13, 13, False, numbers())
    for symbols in (*keys, *values):
        assert sorted(symbols.tolist()) == list(range(13))
    assert len({tuple(row.tolist()) for row in (*keys, *values)}) == 10


def test_with_replacement_every_symbol_is_as_likely_as_any():
    drawn = torch.cat([t.flatten() for t in retrieval.draw(200, 100, 5, True, numbers())])
    shares = torch.bincount(drawn, minlength=5) / drawn.numel()
    # Four standard deviations of a share.
    assert (shares - 0.2).abs().max() < 4 * (0.2 * 0.8 / drawn.numel()) ** 0.5


def written_out(model: retrieval.Retriever, sequences: retrieval.Sequences) -> torch.Tensor:
    """What a Retriever returns for one sequence, token by token: (S,S)."""
    phi, normalize = model.kind.features, lambda x: x / x.sum()
    queries = model.embedding @ model.query
    memory, total = torch.zeros(phi(queries).shape[1], model.symbols), 0.0
    for key, value in zip(*(symbols[0].tolist() for symbols in sequences), strict=True):
        k = phi(model.embedding[key] @ model.key + model.key_of_value[value])
        v = F.one_hot(torch.tensor(value), model.symbols).float()
        if model.delta:
            rate = (model.embedding[key] @ model.rate + model.rate_of_value[value]).sigmoid()
            memory = memory + rate * torch.outer(normalize(k), v - normalize(k) @ memory)
        else:
            memory, total = memory + torch.outer(k, v), total + k
    if model.delta:
        return torch.stack([normalize(q) @ memory for q in phi(queries)])
    return torch.stack([q @ memory / (q @ total + retrieval.EPS) for q in phi(queries)])


def other_rules(model: retrieval.Retriever, sequences: retrieval.Sequences) -> torch.Tensor:
    """The same for mLSTM's gates, levels of log-linear attention, RWKV-7's rule, and MesaNet's regression."""
    queries, more = model.embedding @ model.query, model.more
    length = sequences.keys.shape[1]
    tokens = []
    for key, value in zip(*(symbols[0].tolist() for symbols in sequences), strict=True):
        found = {
            name: model.embedding[key] @ more[name] + more[f"{name}_of_value"][value]
            for name in ("gate", "rate", "decay")
            if name in more
        }
        k = model.embedding[key] @ model.key + model.key_of_value[value]
        tokens.append((k, F.one_hot(torch.tensor(value), model.symbols).float(), found))
    if model.rule == "general":
        memory = torch.zeros(model.size, model.symbols)
        for k, v, found in tokens:
            read = k * more["direction"] / (k * more["direction"]).norm()
            rate = found["rate"].sigmoid()
            write = k / k.norm() * (1 + (rate - 1) * more["part"])
            kept = (-math.exp(-0.5) * (found["decay"] - 6).sigmoid()).exp()
            memory = kept[:, None] * memory + torch.outer(write, v) - torch.outer(rate * read, read @ memory)
        return queries / queries.norm(dim=-1, keepdim=True) @ memory
    if model.rule == "regression":
        squares, memory = (F.softplus(more["ridge"]) + 0.25).diag(), torch.zeros(model.size, model.symbols)
        for (k, v, _), key, value in zip(tokens, sequences.keys[0], sequences.values[0], strict=True):
            rate = (model.embedding[key] @ model.rate + model.rate_of_value[value]).sigmoid()
            squares, memory = (
                total + rate * torch.outer(k / k.norm(), x) for total, x in ((squares, k / k.norm()), (memory, v))
            )
        return queries / queries.norm(dim=-1, keepdim=True) @ squares.inverse() @ memory
    phi = model.kind.features
    if model.rule == "gated":
        memory, total = torch.zeros(model.size, model.symbols), torch.zeros(model.size)
        for k, v, found in tokens:
            enter, forget = found["gate"][0].exp(), found["gate"][1].sigmoid()
            memory = forget * memory + enter * torch.outer(phi(k), v)
            total = forget * total + enter * phi(k)
        return torch.stack([q @ memory / (q @ total) for q in phi(queries)])
    # Stretches as a binary counter: two of a level become one of the next.
    stretches: dict[int, list] = {}
    for k, v, _ in tokens:
        level, one = 0, [torch.outer(phi(k), v), phi(k)]
        while level in stretches:
            one = [a + b for a, b in zip(one, stretches.pop(level), strict=True)]
            level += 1
        stretches[level] = one
    assert sum(2**level for level in stretches) == length
    weights = F.softplus(model.embedding @ more["level"])
    rows = []
    for s, q in enumerate(phi(queries)):
        parts = [
            (weights[s, level] * (q @ memory), weights[s, level] * (q @ n)) for level, (memory, n) in stretches.items()
        ]
        rows.append(sum(part for part, _ in parts) / sum(n for _, n in parts))
    return torch.stack(rows)


@pytest.mark.parametrize("rule", [rule for rule in retrieval.RULES if rule not in retrieval.BASIC])
def test_other_rules_are_their_recurrences(rule):
    model = retrieval.Retriever(7, 5, "linear", rule, numbers())
    sequences = retrieval.draw(2, 11, 7, True, numbers(1))
    expected = torch.stack(
        [other_rules(model, retrieval.Sequences(*(t[i : i + 1] for t in sequences))) for i in (0, 1)]
    )
    torch.testing.assert_close(model(sequences, numbers()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", retrieval.BASIC)
@pytest.mark.parametrize("kind", ["linear", "dpfp1", "dpfp3"])
def test_a_retriever_is_its_recurrence(kind, rule):
    model = retrieval.Retriever(7, 5, kind, rule, numbers())
    sequences = retrieval.draw(2, 11, 7, True, numbers(1))
    expected = torch.stack(
        [written_out(model, retrieval.Sequences(*(t[i : i + 1] for t in sequences))) for i in (0, 1)]
    )
    torch.testing.assert_close(model(sequences, numbers()), expected)
    right = retrieval.answers(sequences, 7)
    errors = [
        (expected[b, s] - F.one_hot(right[b, s], 7)).square().sum() / 2
        for b in range(2)
        for s in range(7)
        if right[b, s] >= 0
    ]
    torch.testing.assert_close(model.loss(sequences, numbers()), torch.stack(errors).mean())


def test_softmax_and_favor_retrieve_by_their_weights():
    sequences = retrieval.draw(1, 7, 7, False, numbers(1))
    values = F.one_hot(sequences.values[0], 7).float()
    for kind in ("softmax", "favor64-kept"):
        model = retrieval.Retriever(7, 5, kind, "sum", numbers())
        q = model.embedding @ model.query
        k = (model.embedding @ model.key)[sequences.keys[0]] + model.key_of_value[sequences.values[0]]
        if kind == "softmax":
            weights = (q @ k.T / 5**0.5).exp()
        else:
            weights = random_features.estimate(q / 5**0.25, k / 5**0.25, model.rows, random_features.hyperbolic)
        expected = weights / weights.sum(-1, keepdim=True) @ values
        torch.testing.assert_close(model(sequences, numbers())[0], expected, rtol=1e-3, atol=1e-3)


def test_favor_as_published_adds_eps_to_what_was_not_shifted():
    sequences = retrieval.draw(1, 7, 7, False, numbers(1))
    values = F.one_hot(sequences.values[0], 7).float()
    model = retrieval.Retriever(7, 5, "favor64", "sum", numbers())
    with torch.no_grad():
        model.query.mul_(5)  # queries so long that EPS counts
    q = model.embedding @ model.query
    k = (model.embedding @ model.key)[sequences.keys[0]] + model.key_of_value[sequences.values[0]]
    weights = random_features.estimate(q, k, model._draw(numbers(3)), random_features.hyperbolic)
    whole = weights.sum(-1, keepdim=True)
    assert (whole < retrieval.EPS).any()
    assert (whole > retrieval.EPS).any()
    expected = weights / (whole + retrieval.EPS) @ values
    torch.testing.assert_close(model(sequences, numbers(3))[0], expected, rtol=1e-3, atol=1e-5)


def test_only_favor_as_published_draws_rows_in_every_call():
    sequences = retrieval.draw(1, 7, 7, False, numbers(1))
    for kind in retrieval.ENCODERS:
        model = retrieval.Retriever(7, 5, kind, "sum", numbers())
        same = model(sequences, numbers(1)).equal(model(sequences, numbers(2)))
        assert same == (kind not in ("favor64", "favor128", "favor512"))
        assert same == capacity.same(kind)


@pytest.mark.parametrize("kind", [name for name, kind in retrieval.ENCODERS.items() if kind.features])
def test_the_number_of_features_is_what_it_is_said_to_be(kind):
    features = retrieval.ENCODERS[kind].features
    assert features is not None
    assert capacity.capacity(kind, 8) == features(torch.randn(3, 8, generator=numbers())).shape[-1]


# Capacity


@pytest.mark.parametrize("features", [1, 3, 6, 7, 20])
def test_no_weights_of_low_rank_beat_the_bound(features):
    found = [
        (torch.eye(7) - a @ b).square().sum().item() / 14
        for a, b in (
            (torch.linalg.qr(a).Q, torch.linalg.qr(a).Q.T) if i else (a / features, a.T)
            for i, a in enumerate(torch.rand(2, 7, min(features, 7), generator=numbers()))
        )
    ]
    assert min(found) >= capacity.bound(features, 7) - 1e-6
    # A projection on as many keys reaches it.
    assert found[1] == pytest.approx(capacity.bound(features, 7), abs=1e-6)


def test_training_stores_as_many_associations_as_there_are_features():
    """On a small scale what the experiment shows on a large one: C keys without a loss, and a bound beyond."""
    settings = replace(capacity.EXPERIMENT.quick, steps=600, rate=1e-2, tests=3, queries=32)
    losses = {}
    for keys in (6, 24):
        point = {"keys": keys, "replaced": False, "rule": "sum", "kind": "dpfp1"}
        losses[keys] = capacity.measure(settings, point, NOWHERE)["loss"]
    assert losses[6] < 0.01
    assert capacity.bound(16, 24) - 1e-6 < losses[24] < 0.3


def test_the_delta_rule_corrects_what_the_sum_cannot():
    settings = replace(capacity.EXPERIMENT.quick, steps=600, rate=1e-2, tests=5, queries=32)
    found = {
        rule: capacity.measure(settings, {"keys": 5, "replaced": True, "rule": rule, "kind": "dpfp1"}, NOWHERE)
        for rule in retrieval.BASIC
    }
    assert found["delta"]["loss"] < 0.03 < 0.1 < found["sum"]["loss"]


# Approximation


@pytest.mark.parametrize("estimator", approximation.ESTIMATORS)
def test_independent_rows_have_the_variance_of_the_formula(estimator):
    settings = replace(approximation.EXPERIMENT.quick, pairs=20000, angles=(0, 40, 90, 135, 180))
    row = approximation.measure(settings, {"features": 8, "estimator": estimator, "rows": "iid"}, NOWHERE)
    for measured, error, formula in zip(row["kernel"], row["kernel_se"], row["formula"], strict=True):
        assert abs(measured - formula) <= 4 * error + 1e-12


@pytest.mark.parametrize("estimator", approximation.ESTIMATORS)
def test_orthogonal_rows_are_no_worse(estimator):
    settings = replace(approximation.EXPERIMENT.quick, pairs=5000)
    iid, orthogonal = (
        approximation.measure(settings, {"features": 8, "estimator": estimator, "rows": rows}, NOWHERE)
        for rows in approximation.ROWS
    )
    for i, angle in enumerate(settings.angles):
        noise = 4 * (iid["kernel_se"][i] + orthogonal["kernel_se"][i])
        assert orthogonal["kernel"][i] <= iid["kernel"][i] + noise, angle


def test_pairs_have_length_1_and_their_angles():
    q, k = approximation.pairs(replace(approximation.EXPERIMENT.quick, size=5))
    torch.testing.assert_close(q.norm(dim=-1), torch.ones_like(q[..., 0]))
    torch.testing.assert_close(k.norm(dim=-1), torch.ones_like(q[..., 0]))
    cosines = (q * k).sum(-1)[:, 0]
    torch.testing.assert_close(cosines, torch.tensor(approximation.EXPERIMENT.quick.angles).double().deg2rad().cos())


def test_the_error_of_the_output_shrinks_with_the_root_of_the_features():
    settings = replace(approximation.EXPERIMENT.quick, length=29, draws=30, pairs=2)
    few, many = (
        approximation.measure(settings, {"features": count, "estimator": "hyperbolic", "rows": "iid"}, NOWHERE)
        for count in (32, 2048)
    )
    (before,), (after,) = few["output"], many["output"]
    assert 20 < before / after < 200  # of the square, with 64 times as many features


@pytest.mark.parametrize(("estimator", "rows"), [("positive", 8), ("hyperbolic", 4), ("trigonometric", 4)])
def test_a_map_of_two_features_a_row_gets_half_the_rows(estimator, rows, monkeypatch):
    drawn, sample = [], random_features.sample

    def recorded(count, features, *arguments, **options):
        drawn.append(features)
        return sample(count, features, *arguments, **options)

    monkeypatch.setattr(random_features, "sample", recorded)
    approximation.measure(
        approximation.EXPERIMENT.quick, {"features": 8, "estimator": estimator, "rows": "iid"}, NOWHERE
    )
    assert set(drawn) == {rows}
