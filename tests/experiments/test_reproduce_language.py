"""The experiment on byte text: models of equal size, equal budgets, and a training that goes on where it stopped."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan import data
from longspan.generation.sampling import generate
from longspan.models.decoder import Decoder
from longspan_lab.experiments import families, language, learning
from longspan_lab.experiments.experiment import Place
from longspan_lab.experiments.families import FAMILIES, LSTM

LAPTOP, QUICK = language.EXPERIMENT.scales["laptop"], language.EXPERIMENT.quick


def track(items, *_):
    return items


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of three documents, small enough to be read at once."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(3):
        (folder / f"{i}.txt").write_bytes(bytes((i * 7 + j * j) % 251 for j in range(700)))
    return f"text:{folder}"


@pytest.fixture(scope="module")
def dataset(text):
    return data.load(text, QUICK.length)


# Equal sizes


@pytest.mark.parametrize("size", [LAPTOP.size(), replace(LAPTOP, dim=64, depth=4, heads=2).size()])
@pytest.mark.parametrize("name", FAMILIES)
def test_models_are_of_equal_size(name, size):
    target = learning.parameters(families._shapes(families.config("softmax", size)))
    model: Any = families.model_memory.shapes(lambda: families.build(name, size))
    assert abs(learning.parameters(model) / target - 1) < 0.02
    if isinstance(model, LSTM):
        # The width is chosen by a formula.
        assert learning.parameters(model) == families._lstm(families.width(size), size.layers)
    else:
        assert (model.config.dim, model.config.depth) == (size.dim, size.depth)


def test_an_attention_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setitem(FAMILIES, "ssd", families.Family("ssd(expand_v=32.0)"))
    families.config.cache_clear()
    with pytest.raises(ValueError, match="dim=96: the attention of ssd has more weights than a whole block of softmax"):
        families.config("ssd", LAPTOP.size())
    families.config.cache_clear()


# The LSTM


def test_an_lstm_goes_on_from_its_state_and_does_not_look_ahead():
    torch.manual_seed(0)
    model = LSTM(5, 2, vocab=11).double()
    tokens = torch.randint(11, (2, 13))
    whole, end = model(tokens)
    first, state = model(tokens[:, :6])
    rest, last = model(tokens[:, 6:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    torch.testing.assert_close(last, end)
    changed = tokens.clone()
    changed[:, 7:] = 0
    torch.testing.assert_close(model(changed)[0][:, :7], whole[:, :7])
    assert model.shift(tokens)[:, 0].tolist() == [11, 11]
    assert model.shift(tokens)[:, 1:].equal(tokens[:, :-1])
    assert whole.shape == (2, 13, 11)


def test_an_lstm_remembers_at_first():
    model = LSTM(4, 2)
    for layer in range(2):
        forget = getattr(model.cells, f"bias_ih_l{layer}") + getattr(model.cells, f"bias_hh_l{layer}")
        assert forget[4:8].tolist() == [1.0] * 4


def test_an_lstm_writes_as_a_decoder_does():
    """One prompt in one call, then a token a call; the draws are those of the outputs that all calls together have."""
    torch.manual_seed(0)
    model, prompt = LSTM(5, 1), torch.tensor([[3, 1, 4], [1, 5, 9]])
    with torch.no_grad():
        # Sure of itself, so that what it draws depends on all that it has read.
        model.head.weight.mul_(100)
    drawn = torch.stack(list(families.written(model, prompt, 7)), 1)
    assert drawn.shape == (2, 7)
    read = torch.cat([torch.full((2, 1), model.start), prompt, drawn], 1)
    outputs, generator = model(read)[0], torch.Generator().manual_seed(0)
    again = [model.likelihood.sample(outputs[:, 3 + i], generator=generator) for i in range(7)]
    assert torch.stack(again, 1).equal(drawn)
    torch.manual_seed(0)
    decoder = Decoder(families.config("gla", QUICK.size())).eval()
    expected = generate(decoder, prompt, max_new_tokens=7, seed=0)
    assert torch.stack(list(families.written(decoder, prompt, 7)), 1).equal(expected)


def test_states_have_the_bytes_of_the_theory():
    size = replace(QUICK, dim=8, heads=2, depth=2, layers=2, window=3).size()
    prompt = torch.zeros(1, 20, dtype=torch.long)
    held = {name: families.state_bytes(families.build(name, size), prompt) for name in ("softmax", "local", "lstm")}
    # Keys and values of the start token and 20 more, in float32, for two layers; each state counts its tokens.
    assert held["softmax"] == 2 * (2 * 21 * 8 * 4 + 8)
    assert held["local"] < held["softmax"] / 3
    assert held["lstm"] == 2 * 2 * families.width(size) * 4
    more = torch.zeros(1, 40, dtype=torch.long)
    assert families.state_bytes(families.build("local", size), more) == held["local"]


def test_the_fastest_round_counts_and_the_prompt_does_not(monkeypatch):
    now = [0.0]
    lasts = iter([5.0, *[1.0] * 3, 5.0, *[0.5] * 3])

    def written(model, prompt, tokens):
        for _ in range(tokens):
            now[0] += next(lasts)
            yield prompt[:, 0]

    monkeypatch.setattr(families, "written", written)
    monkeypatch.setattr(families, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    # Three tokens of two rows in 1.5 seconds; reading the prompt, 5 seconds, comes before.
    assert families.speed(LSTM(4, 1), torch.zeros(2, 3, dtype=torch.long), 3, 2) == pytest.approx(4.0)


# Trainings


def measured(settings, name, place):
    return language.measure(settings, {"model": name}, Place(place, track))


@pytest.mark.parametrize("name", ["transformer_xl", "lstm"])
def test_a_training_that_was_stopped_goes_on_with_the_same_numbers(name, text, tmp_path, monkeypatch):
    settings = replace(QUICK, data=text, steps=6, looks=3)
    whole = measured(settings, name, tmp_path / "whole")
    assert [step for step, *_ in whole["curve"]] == [2, 4, 6]
    looks, held_out = [], language.held_out

    def stopped(*arguments):
        looks.append(arguments)
        if len(looks) == 2:
            raise KeyboardInterrupt
        return held_out(*arguments)

    monkeypatch.setattr(language, "held_out", stopped)
    with pytest.raises(KeyboardInterrupt):
        measured(settings, name, tmp_path / "again")
    monkeypatch.setattr(language, "held_out", held_out)
    steps, step = [], language._step
    monkeypatch.setattr(language, "_step", lambda *words: (steps.append(words[-1]), step(*words)))
    again = measured(settings, name, tmp_path / "again")
    assert steps == [2, 3, 4, 5]
    assert (again["test"], again["steps"]) == (whole["test"], 6)
    assert [[one[0], one[2]] for one in again["curve"]] == [[one[0], one[2]] for one in whole["curve"]]


def test_training_learns_and_the_figures_say_how_much(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"abcd" * 500)
    settings = replace(QUICK, data=f"text:{tmp_path / 'one.txt'}", steps=60, looks=2, learning_rate=1e-2, batch=4)
    row = measured(settings, "lstm", tmp_path)
    # Four letters that follow each other, of 256.
    assert row["test"] < 3.0 < math.log2(256)
    assert row["curve"][1][2] < row["curve"][0][2]
    assert row["training"] == pytest.approx(60 * 4 * 16 / row["seconds"], rel=0.1)
    assert set(row["generation"]) == {"1", "2"}
    assert row["parameters"] == learning.parameters(language.born(settings, "lstm"))


def test_a_budget_of_time_ends_with_the_time(text, dataset, tmp_path, monkeypatch):
    now = [0.0]

    def perf_counter():
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(language, "time", SimpleNamespace(perf_counter=perf_counter, process_time=time.process_time))
    settings = replace(QUICK, data=text, budget="seconds", seconds=3.0, looks=3)
    rates, step = [], language._step
    monkeypatch.setattr(language, "_step", lambda *words: (rates.append(words[2]), step(*words)))
    model = language.born(settings, "lstm")
    kept = language.train(settings, "lstm", model, dataset, Place(tmp_path, track))
    # Each step lasts half a second between two looks at the clock; evaluations do not count.
    assert (kept["step"], kept["seconds"]) == (6, 3.0)
    assert [one[:2] for one in kept["curve"]] == [[2, 1.0], [4, 2.0], [6, 3.0]]
    # A cosine over the time: half the rate when half of it is spent.
    assert rates[0] == settings.learning_rate
    assert rates[3] == pytest.approx(settings.learning_rate / 2)


def test_the_memory_reads_on_where_it_was(text, dataset):
    settings = replace(QUICK, data=text)
    model = language.born(settings, "transformer_xl")
    reader = language.Reader(settings, "transformer_xl", model, dataset)
    first = [reader.loss(step).item() for step in range(3)]
    alone = [language.Reader(settings, "transformer_xl", model, dataset).loss(step).item() for step in range(3)]
    assert first[0] == alone[0]
    assert first[1:] != alone[1:]
    other = language.Reader(settings, "transformer_xl", model, dataset)
    other.load_state_dict(reader.state_dict())
    assert other.loss(3).item() == reader.loss(3).item()


def test_a_loss_that_is_not_finite_is_an_error(text, dataset, tmp_path):
    settings = replace(QUICK, data=text)
    model = language.born(settings, "lstm")
    with torch.no_grad():
        model.head.bias[0] = math.nan
    with pytest.raises(ValueError, match="the loss became nan at step 0; a lower --learning-rate may help"):
        language.train(settings, "lstm", model, dataset, Place(tmp_path, track))
