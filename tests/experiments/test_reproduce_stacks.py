"""Small experiments: ponder times, lengths, learned spans, patterns: tasks, measures, and what was shown."""

import math
from dataclasses import replace

import pytest
import torch

from longspan.models.decoder import Decoder
from longspan_lab.experiments import learning, lengths, pattern, ponder, spans
from longspan_lab.experiments.experiment import Place
from support.experiments import unwatched


class TestPonder:
    def test_parities(self):
        bits, parity = ponder.draw_bits(replace(ponder.EXPERIMENT.quick, bits=6), 50, "test")
        assert parity.tolist() == [[sum(row[: t + 1]) % 2 for t in range(6)] for row in bits.tolist()]
        assert 0.3 < bits.double().mean() < 0.7
        assert not torch.equal(bits, ponder.draw_bits(replace(ponder.EXPERIMENT.quick, bits=6), 50, "train", 0)[0])

    def test_a_bit_reaches_as_far_as_there_are_steps(self):
        """With a window of two, which is what makes t bits need t steps."""
        settings = replace(ponder.EXPERIMENT.quick, bits=8, cap=3)
        model = learning.fresh(settings.config(0.0), 0)
        bits = torch.zeros(1, 8, dtype=torch.long)
        other = bits.clone()
        other[0, 1] = 1
        moved = (model(bits)[0] - model(other)[0]).abs().amax(-1)[0]
        assert (moved > 1e-7).tolist() == [False, *[True] * 4, *[False] * 3]

    def test_by_bits(self):
        settings = replace(ponder.EXPERIMENT.quick, bits=5, cap=4)
        bits, parity = ponder.draw_bits(settings, 30, "test")
        model = learning.fresh(settings.config(0.01), 0)
        found = ponder.by_bits(model, bits, parity)
        record = {"penalty": None}
        outputs, _ = model(bits, record=record)
        assert sum(found["ponders"]) / 5 == pytest.approx(record["penalty"].item(), abs=1e-3)
        right = [(outputs[:, t].argmax(-1) == parity[:, t]).double().mean().item() for t in range(5)]
        assert found["errors"] == pytest.approx([1 - r for r in right], abs=1e-4)
        fixed = ponder.by_bits(learning.fresh(settings.config(0.0), 0), bits, parity)
        assert fixed["ponders"] == fixed["steps"] == [4.0] * 5


class TestLengths:
    def test_sequences(self):
        tokens = lengths.sequences(lengths.EXPERIMENT.quick, 5, 3, "test")
        assert tokens.shape == (5, 8)
        assert torch.equal(tokens[:, :4], tokens[:, 4:])
        assert (tokens[:, 0] == 0).all()
        assert tokens[:, 1:4].min() >= 1

    def test_plain_models_are_as_large_or_as_wide(self):
        settings = lengths.Settings()
        models = {kind: learning.fresh(settings.config(kind, "sinusoidal"), 0) for kind in lengths.VARIANTS}
        weights = {kind: sum(p.numel() for p in model.parameters()) for kind, model in models.items()}
        assert weights[lengths.TIED] == pytest.approx(weights[lengths.UNIVERSAL], rel=0.1)
        assert weights[lengths.DEEP] > 3 * weights[lengths.UNIVERSAL]

    @pytest.mark.parametrize("kind", lengths.VARIANTS)
    def test_offsets_move_the_positions_of_every_model(self, kind):
        """Equal to the outputs after as many masked tokens, at the same positions."""
        settings = replace(lengths.EXPERIMENT.quick, longest=2)
        model = learning.fresh(settings.config(kind, "sinusoidal"), 0).double().eval()
        tokens = lengths.sequences(settings, 2, 2, "test")
        plain = lengths.outputs_of(model, tokens, None)
        zero = lengths.outputs_of(model, tokens, torch.tensor([0, 0]))
        moved = lengths.outputs_of(model, tokens, torch.tensor([0, 9]))
        torch.testing.assert_close(zero, plain, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(moved[0], plain[0], rtol=1e-9, atol=1e-9)
        assert (moved[1] - plain[1]).abs().max() > 1e-3

    def test_what_is_counted(self, monkeypatch):
        settings = replace(lengths.EXPERIMENT.quick, count=2)
        tokens = lengths.sequences(settings, 2, 4, "test", 4)
        said = torch.nn.functional.one_hot(tokens[:, -4:], 5).double()
        said[1, 2] = said[1, 2].roll(1)
        monkeypatch.setattr(lengths, "outputs_of", lambda *_: said)
        assert lengths.copied(None, settings, 4) == [4, 0.875, 0.5]


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


def test_a_model_has_the_pattern_and_sees_no_later_key():
    settings = pattern.EXPERIMENT.quick
    for name in settings.names():
        model = Decoder(settings.config(name, 17, 64))
        (attention,) = model.stack.attentions()
        assert repr(attention.key_pattern) == repr(pattern.patterns.causal() & pattern.patterns.parse(name))


def test_the_sizes_of_the_laptop_cost_the_same():
    keys = {}
    for name in pattern.Settings().names():
        seen = pattern.patterns.causal() & pattern.patterns.parse(name)
        keys[name] = seen.dense(784).sum().item() / 784
    band, column, every = keys.values()
    assert column <= band < every / 10
    assert column > 0.95 * band
