"""Recall by the size of the state, and softmax's weights in a performer: the laws that both experiments stand on."""

import math
from dataclasses import replace

import pytest
import torch

from longspan_lab.experiments import mqar, recall, transfer
from support.experiments import NOWHERE


def numbers(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Recall


@pytest.mark.parametrize(("pairs", "length", "vocab"), [(1, 7, 2), (3, 12, 6), (3, 29, 14)])
def test_the_target_of_every_query_is_the_value_of_its_key(pairs, length, vocab):
    drawn = recall.draw(11, pairs, length, vocab, numbers())
    orders = set()
    for tokens, targets in zip(*(x.tolist() for x in drawn), strict=True):
        keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        memory = dict(zip(keys, values, strict=True))
        assert len(memory) == len(set(values)) == pairs
        assert max(keys) < vocab // 2 <= min(values) < vocab
        asked = [i for i in range(length) if targets[i] >= 0]
        assert sorted(tokens[i] for i in asked) == sorted(keys)
        assert all(i >= 2 * pairs and i % 2 == 0 and targets[i] == memory[tokens[i]] for i in asked)
        assert all(tokens[i] == vocab for i in range(2 * pairs, length) if i not in asked)
        orders.add(tuple(keys.index(tokens[i]) for i in asked))
    assert len(orders) == (1 if pairs == 1 else len(orders))
    assert pairs == 1 or len(orders) > 1


def test_queries_keep_close_to_the_pairs_by_a_power_law():
    count = 20_000
    at = (recall.draw(count, 1, 12, 4, numbers()).targets >= 0).double().mean(0)
    weights = [g**-0.99 for g in range(1, 6)]
    for g, weight in enumerate(weights):
        share = weight / sum(weights)
        # Four standard deviations.
        assert abs(at[2 + 2 * g] - share) < 4 * math.sqrt(share * (1 - share) / count)


def test_loss_and_accuracy_count_the_queries_alone():
    model = recall.Recaller("linear", 4, 1, 1, 4)
    scores = torch.zeros(1, 4, 4)
    scores[0, 2] = torch.tensor([0.0, 0.0, math.log(2), 0.0])  # right: probability 2 / 5
    scores[0, 3] = torch.tensor([9.0, 0.0, 0.0, 0.0])  # asked for nothing
    scores[0, 1] = torch.tensor([0.0, 0.0, math.log(5), 0.0])  # wrong: probability 1 / 8
    model.forward = lambda tokens, record=None: scores
    sequences = recall.Sequences(torch.tensor([[0, 1, 0, 4]]), torch.tensor([[-1, 3, 2, -1]]))
    assert model.accuracy(sequences) == 0.5
    assert model.loss(sequences).item() == pytest.approx((math.log(5 / 2) + math.log(8)) / 2)


def test_the_state_is_what_one_sequence_leaves_behind():
    convolution, sums = 4 * 3 * 8, 4 * 8 * (8 + 1)
    linear, softmax = (recall.Recaller(spec, 8, 1, 2, 4) for spec in ("linear", "softmax"))
    assert linear.state_bytes(16) == linear.state_bytes(1024) == convolution + 2 * sums
    # Keys and values of every token in two layers, and two numbers of eight bytes.
    assert softmax.state_bytes(16) == convolution + 2 * (2 * 4 * 16 * 8 + 8)
    # A mechanism's own convolution counts, too.
    delta = recall.Recaller("deltanet", 8, 1, 1, 4).state_bytes(16)
    assert delta == convolution + 4 * 8 * 8 + 3 * convolution


def test_the_convolution_shows_a_value_its_key_and_nothing_later():
    torch.manual_seed(0)
    model, tokens = recall.Recaller("softmax", 8, 1, 1, 6).double(), torch.tensor([[0, 3, 1, 4, 6, 0]])
    other = torch.tensor([[0, 3, 2, 4, 6, 0]])
    x, y = (model.embedding(t) + model.convolution(model.embedding(t))[0] for t in (tokens, other))
    changed = (x - y).abs().amax((0, 2)) > 0
    # Four wide: the token itself and the three after it.
    assert changed.tolist() == [False, False, True, True, True, True]
    assert torch.equal(model(tokens)[:, :2], model(other)[:, :2])


EASY = mqar.Settings(
    specs="softmax; deltanet", dims=(16,), rates=(1e-2,), pairs=(1, 2), vocab=6, steps=400, batch=32, tests=64
)


@pytest.mark.parametrize("name", ["softmax", "deltanet"])
def test_what_can_be_recalled_is_learned_and_then_the_training_ends(name):
    found = mqar.measure(EASY, {"dim": 16, "spec": name, "rate": 1e-2}, NOWHERE)
    assert min(found["accuracy"]) > 0.97
    assert found["steps"] < EASY.steps
    assert found["steps"] % mqar.EVERY == 0


def test_without_a_training_only_chance_is_right():
    found = mqar.measure(replace(EASY, steps=1, tests=512), {"dim": 16, "spec": "softmax", "rate": 1e-9}, NOWHERE)
    # Of six tokens at most three are values; an untrained model may know none of them.
    assert max(found["accuracy"]) < 0.6


@pytest.mark.parametrize("name", ["gated_deltanet", "nsa(block=2, top=3, window=2)"])
def test_models_of_equal_weights_differ_by_less_than_a_unit_of_the_feedforward(name):
    settings = replace(EASY, equal="weights", steps=1)
    counts = [
        mqar.measure(settings, {"dim": 16, "spec": s, "rate": 1e-2}, NOWHERE)["parameters"] for s in ("softmax", name)
    ]
    assert abs(counts[0] - counts[1]) <= 2 * 16 + 1


def test_an_attention_larger_than_a_block_of_softmax_is_refused():
    with pytest.raises(ValueError, match="dims=8: longhorn has more than the"):
        replace(EASY, specs="longhorn", dims=(8,), equal="weights").buildable()


def test_a_budget_of_time_ends_the_training():
    found = mqar.measure(replace(EASY, seconds=1e-6), {"dim": 16, "spec": "linear", "rate": 1e-2}, NOWHERE)
    assert found["steps"] == 1


def test_an_indexer_learns_from_its_penalty():
    model = recall.Recaller("dsa(keys=2, index_heads=1, index_dim=2)", 8, 1, 1, 6)
    model.loss(recall.draw(4, 2, 8, 6, numbers())).backward()
    assert model.stack.attentions()[0].index_query.weight.grad.abs().max() > 0


def test_of_several_rates_the_best_counts():
    rows = [
        {"dim": dim, "spec": "linear", "rate": rate, "accuracy": shares}
        for dim, rate, shares in (
            (8, 0.1, [0.5, 0.2]),
            (8, 0.2, [0.4, 0.4]),
            (16, 0.1, [0.9, 0.1]),
            (8, 0.3, [0.7, 0.1]),
        )
    ]
    assert mqar.best(rows) == [rows[1], rows[2]]


# Transfer

SMALL = transfer.Settings(
    dim=16, depth=1, heads=2, steps=40, rate=1e-2, finetune=10, batch=16, features=(32,), draws=3, every=5, images=16
)
POINTS = {point["start"]: point for point in transfer.points(SMALL)}


@pytest.fixture(scope="module")
def rows():
    return {start: transfer.measure(SMALL, point, NOWHERE) for start, point in POINTS.items()}


def tokens() -> torch.Tensor:
    return transfer.digits().take("test", torch.arange(3))


def weights(model) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def test_a_swap_keeps_every_weight_and_draws_the_rows_of_the_seed():
    model = transfer.fresh(SMALL, "softmax")
    swapped, scratch = transfer.swap(model, SMALL.performer(32)), transfer.fresh(SMALL, SMALL.performer(32))
    before, after = model.state_dict(), swapped.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    (rows,) = set(after) - set(before)
    assert torch.equal(after[rows], scratch.state_dict()[rows])
    # And no memory is shared.
    after["head.bias"].add_(1.0)
    assert not torch.equal(after["head.bias"], model.state_dict()["head.bias"])


def test_with_many_rows_a_swapped_performer_is_the_softmax_transformer():
    model = transfer.fresh(SMALL, "softmax")
    with torch.no_grad():
        # Weights of a newborn attend to all alike, which any rows can do.
        for attention in model.stack.attentions():
            attention.query.weight *= 12
            attention.key.weight *= 12
            attention.out.weight *= 20
        exact = model(tokens())[0]
        swapped = [transfer.swap(model, SMALL.performer(count))(tokens())[0] for count in (4, 64, 4096)]
    few, some, many = ((one - exact).square().mean() / exact.var() for one in swapped)
    assert few > 0.2
    assert few > some > many
    assert many < 0.03


REFUSED = {
    "deltanet": "deltanet cannot take over the weights of softmax: stack.blocks.0.attention.",
    "softmax(kv_heads=1)": "softmax(kv_heads=1) has weights of other shapes than softmax",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_swap_for_attentions_with_other_weights_is_refused(name):
    with pytest.raises(ValueError, match="than|take over") as error:
        transfer.swap(transfer.fresh(SMALL, "softmax"), name)
    assert str(error.value).startswith(REFUSED[name])


def test_the_swapped_performer_knows_what_softmax_learned_and_recovers_the_rest(rows):
    softmax, swapped, scratch = (rows[start] for start in ("softmax", "swapped", "scratch"))
    born, learned = scratch["curve"][0][1], softmax["before"][0]
    # Most of what was learned survives the swap, and a few steps bring back most of what was lost.
    assert max(swapped["before"]) < (born + learned) / 2
    assert swapped["test"] < swapped["before"][0]
    assert swapped["test"] < scratch["test"]


def test_curves_meet_at_the_swap(rows):
    steps = [step for step, _ in rows["softmax"]["curve"]]
    assert steps == [*range(-SMALL.steps, 1, SMALL.every), *range(SMALL.every, SMALL.finetune + 1, SMALL.every)]
    for start in ("swapped", "scratch"):
        assert [step for step, _ in rows[start]["curve"]] == [0, 5, 10]


def test_a_point_leaves_the_trained_weights_to_the_next():
    before = weights(transfer.trained(SMALL)[0])
    for point in POINTS.values():
        transfer.measure(replace(SMALL), point, NOWHERE)
    after = transfer.trained(SMALL)[0].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_redraws_are_independent_and_end_with_the_first_rows(rows):
    assert len(set(rows["swapped"]["before"])) == SMALL.draws
    model = transfer.swap(transfer.trained(SMALL)[0], SMALL.performer(32))
    before, at_first = weights(model), transfer.test(model, SMALL)
    assert transfer.redrawn(model, SMALL)[0] == at_first
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_finetune_goes_on_with_the_images_where_the_training_ended(monkeypatch, rows):
    read = []

    def spy(count, seed, index, batch):
        read.append(index)
        return torch.arange(batch)

    monkeypatch.setattr(transfer, "batch_indices", spy)
    transfer.measure(SMALL, POINTS["swapped"], NOWHERE)
    assert read == list(range(SMALL.steps, SMALL.steps + SMALL.finetune))
