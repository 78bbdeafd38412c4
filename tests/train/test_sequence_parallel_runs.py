"""Training with rows that are spread over processes: losses, weights and examples are those of one process."""

import csv
import json
from dataclasses import replace

import pytest
import torch
import yaml
from test_resume import finish, start

from longspan.train import fit
from training_process import TINY, tiny

# 64 tokens; clipped in every step.
FIELDS = {"dropout": 0.0, "double": True, "steps": 6, "evaluate_every": 2, "save_every": 3, "clip": 0.05, "keep": 9}
ATTENTION = "gated_deltanet; local(window=9)"
LIMIT = 1e-10


def model(attention):
    return TINY.to_dict() | {"dropout": 0.0, "attention": attention, "positions": "sinusoidal", "depth": 2}


def trained(folder, attention=ATTENTION, **fields):
    finish(start(folder, model=model(attention), **FIELDS | fields), folder)
    return folder


def rows(folder):
    with (folder / "run" / "metrics.csv").open() as file:
        return [{k: float(row[k]) for k in ("step", "loss", "validation_bits", "gradient_norm")} for row in csv.DictReader(file)]


def check(found, wanted, limit=LIMIT):
    """Weights, losses, norms and validation of two runs are equal within ``limit``."""
    own, other = (torch.load(folder / "weights-0.pt") for folder in (found, wanted))
    assert list(own) == list(other)
    for name, value in own.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=limit, msg=name)
    assert len(rows(found)) == len(rows(wanted)) >= 2
    for one, two in zip(rows(found), rows(wanted), strict=True):
        assert one == pytest.approx(two, rel=limit, abs=limit)
        assert one["gradient_norm"] > FIELDS["clip"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one process with four examples per step."""
    return trained(tmp_path_factory.mktemp("whole"), batch=4)


def test_two_processes_equal_one(whole, tmp_path):
    check(trained(tmp_path, batch=4, devices=2, sequence_parallel=2), whole)
