"""Objectives: their weights and carried tensors are trained, saved and resumed with the run."""

import pytest
import torch
from torch import nn

import longspan
from longspan.models import checkpoint
from longspan.models.decoder import Decoder
from longspan.train import fit, objectives
from support.runs import fit_in_two
from training_process import TINY, tiny, weights

pytestmark = pytest.mark.usefixtures("one_thread")


class Carrying(objectives.NextToken):
    """The loss weighed by a mean of the losses before it, and by a trained weight."""

    def __init__(self, run, dataset):
        super().__init__(run, dataset)
        self.weight = nn.Parameter(torch.ones(2, 1))
        self.register_buffer("before", torch.zeros(()))

    def loss(self, model, batch):
        loss, parts = super().loss(model, batch)
        total = loss * (1 + self.before) + (self.weight.sum() - loss.detach()) ** 2
        self.before = (self.before + loss.detach()) / 2
        return objectives.Loss(total, parts)


@pytest.fixture(autouse=True)
def carrying(monkeypatch):
    monkeypatch.setitem(objectives.OBJECTIVES, Decoder, Carrying)


def own(folder):
    return checkpoint.load_training(checkpoint.resolve(folder / "run", prefer="last"))["objective"]


def test_interrupted_and_resumed_is_uninterrupted(tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(TINY, tiny(whole), progress=False)
    fit_in_two(TINY, tiny(cut), 5, monkeypatch)
    assert weights(cut) == weights(whole)
    assert set(own(cut)) == {"objective.weight", "objective.before"}
    assert all(torch.equal(value, own(whole)[name]) for name, value in own(cut).items())


def test_it_is_trained_and_no_weight_of_the_model(tmp_path):
    fit(TINY, tiny(tmp_path), progress=False)
    assert (own(tmp_path)["objective.weight"] != 1).all()
    assert own(tmp_path)["objective.before"] > 1
    assert set(longspan.load(tmp_path / "run").state_dict()) == set(Decoder(TINY).state_dict())


def test_a_run_that_brings_nothing_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(objectives.OBJECTIVES, Decoder, objectives.NextToken)
    fit(TINY, tiny(tmp_path, steps=1), progress=False)
    assert "objective" not in checkpoint.load_training(checkpoint.resolve(tmp_path / "run", prefer="last"))
