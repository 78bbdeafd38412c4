"""The speech experiment: encoders of equal size, trainings that go on as they were, models that transcribe."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.cli.entry import main
from longspan.models import checkpoint
from longspan.models.transcriber import Transcriber
from longspan_lab.experiments import EXPERIMENTS, learning, published, runner, speech, speech_report, speech_train
from longspan_lab.experiments.experiment import Place
from longspan_lab.speech import corpora
from support.experiments import unwatched

QUICK = speech.EXPERIMENT.quick


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "work", unwatched)


@pytest.mark.parametrize("settings", [QUICK, EXPERIMENTS["speech"].scales["laptop"]], ids=["quick", "laptop"])
@pytest.mark.parametrize("direction", speech.DIRECTIONS)
def test_encoders_have_as_many_parameters(settings, direction):
    settings = replace(settings, direction=direction)
    sizes = {name: learning.parameters(speech_train.build(name, settings.config(name), 0)) for name in settings.names()}
    assert len(sizes) >= 3
    # Reformer has one map for queries and keys.
    assert max(sizes.values()) / min(sizes.values()) < 1.1
    assert abs(sizes["lstm"] / sizes["softmax"] - 1) < 0.04


@pytest.mark.parametrize("direction", speech.DIRECTIONS)
def test_the_lstm_reads_real_frames_alone_in_its_directions(direction):
    model = speech_train.build("lstm", replace(QUICK, direction=direction).config("lstm"), 0).double().eval()
    frames = torch.randn(2, 30, 40, dtype=torch.float64)
    logits, tokens = model(frames, torch.tensor([30, 18]))
    assert tokens.tolist() == [15, 9]
    alone, _ = model(frames[1:, :18], torch.tensor([18]))
    torch.testing.assert_close(logits[1:, :9], alone)
    frames[0, 20:] += 1
    moved, _ = model(frames, torch.tensor([30, 18]))
    assert torch.equal(moved[0, :10], logits[0, :10]) == (direction == "causal")


def test_a_training_goes_on_with_the_same_numbers(tmp_path):
    settings = replace(QUICK, epochs=4)
    corpus = settings.corpus()
    training = speech_train.Training("linear", 4, 4, 1e-3, 2, 0)

    def learned(place: Place) -> tuple[dict, dict]:
        model = speech_train.build("linear", settings.config("linear", corpus), 0)
        found = speech_train.learn(model, corpus, training, place)
        return {key: found[key] for key in found if key != "seconds"}, model.state_dict()

    def stopped(items, *_):
        for epoch in items:
            if epoch == 3:
                raise KeyboardInterrupt
            yield epoch

    whole, weights = learned(Place(tmp_path / "whole", unwatched))
    with pytest.raises(KeyboardInterrupt):
        learned(Place(tmp_path / "part", stopped))
    again, others = learned(Place(tmp_path / "part", unwatched))
    assert again == whole
    assert [row[0] for row in whole["curve"]] == [2, 4]
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def test_a_training_learns_the_tones(place):
    """Some epochs bring the errors far below chance, which is nine of ten words."""
    settings = replace(QUICK, units="words", dim=32, epochs=40, batch=2, evaluate_every=40, learning_rate=1e-2)
    found = speech.train(settings, "softmax", place)
    assert found["errors"]["validation"]["greedy"]["words"] < 0.5
    model = checkpoint.load(place.folder / "softmax")
    corpus = settings.corpus()
    assert type(model) is Transcriber
    assert checkpoint.read_config(place.folder / "softmax")["run"]["data"] == "tones"
    again = speech_train.errors(model, corpus.held["test"], corpus.labels, 2)
    assert speech._rounded(again) == found["errors"]["test"]["beam"]


def test_a_loss_that_is_lost_ends_the_training(place):
    settings = replace(QUICK, learning_rate=1e19)
    with pytest.raises(ValueError, match=r"the loss of linear is .* in epoch \d; try a lower learning_rate"):
        speech.train(settings, "linear", place)


def test_what_is_hidden_is_some_channels_of_each_row():
    frames, mean = torch.ones(3, 7, 40), torch.full((40,), 5.0)
    speech_train.hide(frames, mean, np.random.default_rng(0))
    hidden = frames == 5
    assert ((frames == 1) | hidden).all()
    assert torch.equal(hidden, hidden[:, :1].expand_as(hidden))
    assert hidden.any()
    assert hidden[:, 0].sum(1).max() <= speech_train.BANDS * 6


def test_utterances_are_joined_to_any_length():
    corpus = corpora.load("tones", units="letters", longest=3)
    frames, lengths, targets = speech_train.concatenated(corpus, 700, 2)
    assert frames.shape == (2, 700, corpus.features)
    assert lengths.tolist() == [700, 700]
    spoken = sorted(corpus.train(0), key=lambda one: len(one.frames))
    assert torch.equal(frames[0, : len(spoken[0].frames)], spoken[0].frames)
    assert targets[0][: len(spoken[0].target)] == spoken[0].target
    assert all(targets)


def test_every_published_row_has_an_encoder():
    names = {speech_report.called(name) for name in EXPERIMENTS["speech"].scales["laptop"].names()}
    assert names == {row.name for row in published.SPEECH}


def test_the_command_leaves_models_that_transcribe(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "picture", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "speech", "--quick"]) == 0
    rows = json.loads(Path("reproduce/speech.json").read_text(encoding="utf-8"))["rows"]
    assert [row.get("encoder", row.get("frames")) for row in rows] == ["lstm", "softmax", "linear", 200, 400]
    assert set(rows[0]["errors"]) == {"validation", "test"}
    capsys.readouterr()
    # Tones are no recordings.
    assert main(["transcribe", "reproduce/speech-work/linear", "none.wav"]) == 2
    assert "cannot read none.wav" in capsys.readouterr().err
