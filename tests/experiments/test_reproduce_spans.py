"""Learned spans: what is trained, the cost of a head, and the report."""

import math

import pytest

pytest.importorskip("matplotlib", reason="the experiments draw: pip install longspan[plot]")
pytest.importorskip("lightning", reason="the models are trained: pip install longspan[train]")

import torch

from longspan.models.decoder import Decoder
from longspan_lab.experiments import spans
from longspan_lab.experiments.experiment import Place
from support.experiments import unwatched


def decoder(fractions):
    model = Decoder(spans.EXPERIMENT.quick.config(spans.PRICED))
    for part, values in zip(model.stack.attentions(), fractions, strict=True):
        part.fraction.data = torch.tensor(values)
    return model


def test_a_head_costs_the_keys_that_have_a_weight():
    """Against the recorded weights of a query that is far from the beginning."""
    model, record = decoder([[0.0, 0.3], [0.5, 1.2]]), {}
    assert [z for layer in spans.spans(model) for z in layer] == pytest.approx([0.0, 4.8, 8.0, 16.0])
    with torch.no_grad():
        model(torch.arange(32)[None], record=record)
    seen = [(layer["matrix"][0, :, -1] > 0).sum(-1).tolist() for layer in record["layers"]]
    assert seen == [[4, 9], [12, 20]]
    assert spans.cost(model) == sum(map(sum, seen)) / 4


def test_only_the_penalty_sets_the_two_trainings_apart(tmp_path):
    settings = spans.Settings()
    free, priced, window = (settings.run(kind, tmp_path) for kind in spans.VARIANTS)
    assert (free.penalty, priced.penalty, window.penalty) == (0.0, settings.penalty, 0.0)
    assert free == window
    assert settings.config(spans.FREE) == settings.config(spans.PRICED)
    (attention, *_) = Decoder(settings.config(spans.WINDOW, 30)).stack.attentions()
    assert attention.key_pattern.dense(40)[..., -1, :].sum() == 30


@pytest.mark.full
def test_a_run_keeps_the_spans_of_every_look(tmp_path):
    place = Place(tmp_path / "spans-work", unwatched)
    free, priced, window = (spans.measure(spans.EXPERIMENT.quick, {"kind": kind}, place) for kind in spans.VARIANTS)
    assert [step for step, _ in priced["spans"]] == [0, 2, 4]
    assert priced["spans"][0][1] == [[8.0, 8.0], [8.0, 8.0]]
    assert priced["spans"][-1][1] == [[round(z, 2) for z in layer] for layer in spans.spans(last(place, "priced"))]
    assert priced["spans"] != free["spans"]
    assert window["spans"] == []
    assert window["keys"] == round(priced["keys"])
    assert last(place, "window").config.attention == f"local(window={window['keys']:.0f})"


def last(place, kind):
    from longspan.models import checkpoint

    return checkpoint.load(checkpoint.resolve(place.folder / kind, prefer="last"))


def test_the_tables_tell_means_and_the_spans_in_order():
    rows = [
        {"kind": spans.FREE, "keys": 12.0, "spans": [[0, [[8.0]]], [4, [[9.0, 7.0], [3.0, 5.0]]]], "test": 2.5},
        {"kind": spans.WINDOW, "keys": 10.0, "spans": [], "test": 2.25},
    ]
    rows = [row | {"curve": [[2, 3.0], [4, 2.0], [6, 2.5]]} for row in rows]
    first, second = spans.tables({"settings": {"depth": 2}, "rows": rows})
    assert first[1:] == [
        [spans.FREE, "6.0", "12.0", "2.0000", "2.5000"],
        [spans.WINDOW, "", "10.0", "2.0000", "2.2500"],
    ]
    assert second == [["spans of the heads", "layer 1", "layer 2"], [spans.FREE, "7 9", "3 5"]]


def test_what_was_measured_shows_that_spans_shrink_under_the_penalty():
    """The result in the docs: fewer keys than without it, no more bits than the window of the same cost."""
    import json
    from pathlib import Path

    path = Path(__file__).parents[2] / "docs" / "results" / "reproduction" / "spans.json"
    free, priced, window = json.loads(path.read_text(encoding="utf-8"))["rows"]
    begin, end = ([z for layer in priced["spans"][i][1] for z in layer] for i in (0, -1))
    assert sum(end) < sum(begin) / 2
    assert priced["keys"] < free["keys"] / 2
    assert math.isclose(priced["keys"], window["keys"], abs_tol=0.5)
    assert priced["test"] < window["test"]
