"""Forecasts: which hours a model sees, the cheap baselines, and the report."""

from dataclasses import replace

import pytest
import torch

from longspan_lab.data import series
from longspan_lab.experiments import forecast, published
from longspan_lab.experiments.experiment import Place
from longspan_lab.experiments.forecaster import PENALTIES, Distilling, Forecaster, Ridge, last_day, last_value
from support.experiments import NOWHERE, unwatched


def model(attention="linear", channels=3):
    torch.manual_seed(0)
    return Forecaster(attention, channels, dim=8, heads=2, depth=2, feedforward=16).double()


@pytest.mark.parametrize("attention", ["informer(factor=1)", "softmax", "gla"])
def test_a_forecast_has_every_hour_to_come_and_knows_what_is_read(attention):
    one = model(attention)
    known = torch.randn(2, 20, 3, dtype=torch.float64, requires_grad=True)
    times = torch.rand(2, 27, 4, dtype=torch.float64)
    foretold = one(known, times, 5)
    assert foretold.shape == (2, 7, 3)
    # Every hour that is read has a part in the last one, those before the label through the encoder alone.
    (gradient,) = torch.autograd.grad(foretold[:, -1].sum(), known)
    assert (gradient.abs().sum(-1) > 0).all()
    assert torch.equal(one(known, times, 5), foretold)
    # And so have the dates of the hours to come.
    later = times.clone()
    later[:, 20:] += 0.25
    assert not torch.allclose(one(known, later, 5), foretold)


def test_the_decoder_begins_with_the_label_and_zeros(monkeypatch):
    one, seen = model(), []
    embed = one.target.forward
    monkeypatch.setattr(
        one.target, "forward", lambda values, times: (seen.append((values, times)), embed(values, times))[1]
    )
    known, times = torch.randn(1, 20, 3, dtype=torch.float64), torch.rand(1, 27, 4, dtype=torch.float64)
    one(known, times, 5)
    ((values, dates),) = seen
    assert torch.equal(values[:, :5], known[:, 15:])
    assert values.shape == (1, 12, 3)
    assert not values[:, 5:].any()
    assert torch.equal(dates, times[:, 15:])


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_distilling_halves(length):
    found = Distilling(4)(torch.randn(2, length, 4))
    assert found.shape == (2, (length + 1) // 2, 4)


def test_the_last_value_and_the_last_day():
    known = torch.arange(60.0).view(1, 30, 2)
    assert torch.equal(last_value(known, 3), torch.tensor([[[58.0, 59.0]] * 3]))
    day = last_day(known, 50)
    # A day before each hour: 6 is the first of the last 24.
    assert torch.equal(day[:, :24], known[:, 6:])
    assert torch.equal(day[:, 24:48], known[:, 6:])
    assert torch.equal(day[:, 48:], known[:, 6:8])
    assert torch.equal(last_day(known[:, :2], 3), known[:, [0, 1, 0]])


def test_ridge_finds_what_is_linear():
    """x_t = 2 x_{t-1} - x_{t-2} + 1, a parabola, whose next values follow from two and a constant."""
    hours = torch.arange(60, dtype=torch.float64)
    values = torch.stack([hours * (hours + 1) / 2, hours * (hours - 9) / 2 + 4], 1)
    ridge = Ridge(values, range(10, 50), 4, 3)
    assert ridge.count == 2 * 40
    foretold = ridge.foretold(ridge.weights(1e-12), values[None, 40:44])
    torch.testing.assert_close(foretold, values[None, 44:47], atol=1e-3, rtol=1e-5)


def test_ridge_is_the_least_of_what_it_minimizes():
    random = torch.Generator().manual_seed(0)
    values = torch.randn(80, 2, generator=random, dtype=torch.float64).cumsum(0)
    reads, horizon, penalty = 5, 2, 0.3
    begins = range(11, 70)
    ridge = Ridge(values, begins, reads, horizon)
    found = ridge.weights(penalty).requires_grad_()
    known = torch.stack([values[at - reads : at] for at in begins])
    targets = torch.stack([values[at : at + horizon] for at in begins])
    loss = (Ridge.foretold(found, known) - targets).square().sum() + penalty * 2 * len(begins) * found[
        :-1
    ].square().sum()
    (gradient,) = torch.autograd.grad(loss, found)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-8, rtol=0)


def test_ridge_learns_from_training_alone_and_validation_chooses():
    settings, point = forecast.EXPERIMENT.quick, {"model": forecast.LINEAR, "horizon": 6}
    found = series.load("synthetic", 0)
    row = forecast.measure(settings, point, NOWHERE)
    ridge = Ridge(found.values, found.windows("train", 24, 6), 24, 6)
    errors = {}
    for penalty in PENALTIES:
        weights = ridge.weights(penalty)
        values = [found.values[at - 24 : at + 6] for at in found.windows("validation", 24, 6)]
        off = torch.stack([ridge.foretold(weights, one[None, :24])[0] - one[24:] for one in values])
        errors[penalty] = float(off.square().mean())
    assert row["penalty"] == min(errors, key=errors.__getitem__)
    changed = series.Series("", found.names, found.values.clone(), found.times, found.ends, "")
    changed.values[720:] = 9.0
    same = Ridge(changed.values, changed.windows("train", 24, 6), 24, 6)
    assert torch.equal(same.weights(0.1), ridge.weights(0.1))


def test_errors_are_means_over_hours_and_series(monkeypatch):
    found = series.load("synthetic", 0)
    windows = torch.tensor([720, 800, 901])
    _, _, targets = forecast.taken(found, windows, 24, 6)
    assert torch.equal(targets[1], found.values[800:806])
    expected = {"mse": targets.square().mean().item(), "mae": targets.abs().mean().item()}
    for most in (1, 60, 10_000):
        monkeypatch.setattr(forecast, "TESTED", most)
        got = forecast.errors(lambda known, times: torch.zeros(len(known), 6, 7), found, windows, 24, 6)
        assert got == pytest.approx(expected, abs=1e-5)


def test_windows_are_the_published_ones():
    settings = forecast.Settings()
    published = [(48, 48), (96, 48), (168, 168), (168, 168), (336, 336)]
    assert [settings.window(horizon) for horizon in settings.horizons] == published
    one = replace(settings, series="OT")
    assert [one.window(horizon) for horizon in (24, 720)] == [(720, 168), (720, 336)]
    assert replace(settings, reads=30, label=10).window(24) == (30, 10)


def test_the_weights_that_are_tested_are_the_best_of_validation(tmp_path):
    """With a rate that ruins the model, the first look is the best."""
    place = Place(tmp_path, unwatched)
    settings = replace(forecast.EXPERIMENT.quick, rate=1000.0, steps=6)
    row = forecast.measure(settings, {"model": "linear", "horizon": 6, "seed": 0}, place)
    best = min(row["curve"], key=lambda look: look["mse"])
    assert row["best"] == best["step"] < 6
    assert row["mse"] < row["curve"][-1]["mse"] / 2


def test_published_figures_belong_to_the_published_data_alone():
    for settings in (forecast.Settings(), forecast.Settings(series="OT")):
        found = forecast.of_the_paper({"settings": {"data": "ett:x.csv", "series": settings.series}})
        assert found is published.FORECAST[settings.series]
        assert all(set(errors) == set(settings.horizons) for errors in found.values())
    assert forecast.of_the_paper({"settings": {"data": "synthetic", "series": "all"}}) == {}
    assert forecast.of_the_paper({"settings": {"data": "ett", "series": "HUFL"}}) == {}


def test_evenly_spaced_windows():
    assert forecast.spaced(range(5, 9), 0).tolist() == [5, 6, 7, 8]
    assert forecast.spaced(range(5, 9), 7).tolist() == [5, 6, 7, 8]
    assert forecast.spaced(range(5, 106), 3).tolist() == [5, 55, 105]
    assert forecast.spaced(range(5, 9), 1).tolist() == [5]
