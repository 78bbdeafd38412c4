"""Ponder time by difficulty, and copying beyond the lengths of the training: tasks, measures, and the report."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib", reason="the experiments draw: pip install longspan[plot]")
pytest.importorskip("lightning", reason="training lends its learning rates: pip install longspan[train]")

from longspan_lab.experiments import learning, lengths, ponder


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
