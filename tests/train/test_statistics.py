"""Buffers that mechanisms' own statistics move: after each step of a training, by all of its micro-batches."""

import pytest

import longspan
from longspan.models.config import DecoderConfig
from longspan.train import fit
from support.runs import fit_in_two
from training_process import tiny, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = "routing(clusters=3, window=5); softmax"
LEARNING = DecoderConfig(dim=8, heads=2, feedforward=12, depth=2, attention=SPEC, vocab=17, length=64)


def counts(folder):
    return longspan.load(folder / "run").stack.attentions()[0].counts


def test_they_move_with_and_without_a_penalty(tmp_path):
    """Of 11 steps of 5 examples of 64 digits; a step's counts join with weight 1/1000."""
    for penalty in (0.0, 0.01):
        folder = tmp_path / str(penalty)
        fit(LEARNING, tiny(folder, penalty=penalty), progress=False)
        total, seen = 3 * 0.999**11, 5 * 64 * (1 - 0.999**11)
        assert counts(folder).sum(-1).tolist() == pytest.approx([total + seen] * 2, rel=0.05)


def test_micro_batches_are_added_up(tmp_path):
    fit(LEARNING, tiny(tmp_path, steps=1, accumulate=3), progress=False)
    assert counts(tmp_path).sum(-1).tolist() == pytest.approx([3 * 0.999 + 3 * 5 * 64 / 1000] * 2, rel=1e-5)


def test_interrupted_and_resumed_is_uninterrupted(tmp_path, monkeypatch):
    fit(LEARNING, tiny(tmp_path / "whole", accumulate=2), progress=False)
    fit_in_two(LEARNING, tiny(tmp_path / "cut", accumulate=2), 10, monkeypatch)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
