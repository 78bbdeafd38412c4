"""Training with rows that are spread over processes: losses, weights and examples are those of one process."""

import csv
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

import longspan
from longspan.cli import main
from support.runs import trained
from training_process import HANGS, TINY

# 64 tokens; clipped in every step.
FIELDS = {"dropout": 0.0, "double": True, "steps": 6, "evaluate_every": 2, "save_every": 2, "clip": 0.05, "keep": 9}
ATTENTION = "gated_deltanet; local(window=9)"
LIMIT = 1e-10


MODEL = TINY.to_dict() | {"dropout": 0.0, "attention": ATTENTION, "positions": "sinusoidal", "depth": 2}


def ran(folder, **fields):
    return trained(folder, model=MODEL, **FIELDS | fields)


def rows(folder):
    names = ("step", "loss", "validation_bits", "gradient_norm")
    with (folder / "run" / "metrics.csv").open() as file:
        return [{name: float(row[name]) for name in names} for row in csv.DictReader(file)]


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
    return ran(tmp_path_factory.mktemp("whole"), batch=4)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The run of two processes that share each example."""
    return ran(tmp_path_factory.mktemp("shared"), batch=2, accumulate=2, devices=2, sequence_parallel=2)


def test_two_processes_equal_one(whole, shared):
    check(shared, whole)
    taken = [json.loads((shared / f"taken-{rank}.json").read_text()) for rank in range(2)]
    assert taken[0] == taken[1]


# Four processes: two read two examples each, and each example has two parts.
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"strategy": "ddp", "batch": 1, "accumulate": 2}, marks=pytest.mark.slow),
        {"strategy": "fsdp", "batch": 2},
    ],
)
def test_of_data_and_sequence(fields, whole, tmp_path):
    check(ran(tmp_path / "four", devices=4, sequence_parallel=2, **fields), whole)


# 64 tokens in three parts; and other examples for each process. The number of micro-batches follows.
@pytest.mark.parametrize(("devices", "parts", "accumulate"), [pytest.param(3, 3, 2, marks=pytest.mark.slow), (2, 1, 1)])
def test_resumed_with_other_processes_and_parts(devices, parts, accumulate, whole, shared, tmp_path):
    at = shutil.copytree(shared / "run", tmp_path / "run") / "checkpoints"
    for name in ("best", "last"):
        (at / name).write_text("step-00000002\n")
    for name in ("step-00000004", "step-00000006"):
        shutil.rmtree(at / name)
    ran(tmp_path, batch=2, accumulate=2, devices=devices, sequence_parallel=parts, resume=True)
    check(tmp_path, whole)
    recipe = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["run"]
    assert (recipe["accumulate"], recipe["sequence_parallel"]) == (accumulate, parts)


# Documents of a folder, several in a window; one of them crosses the middle.
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_documents_are_kept_apart(strategy, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(200):
        (texts / f"{i:03d}.txt").write_bytes(bytes((i * 7 + j * j) % 17 for j in range(5 + 3 * (i % 9))))
    fields = FIELDS | {"data": f"text:{texts}", "length": 37, "segments": True, "batch": 2}
    fields["model"] = MODEL | {"vocab": 256, "length": 37}
    one = trained(tmp_path / "one", **fields)
    check(trained(tmp_path / "two", devices=2, sequence_parallel=2, strategy=strategy, **fields), one)


# In float32, by the command line: parts of the weights and of the examples.
def test_torchrun_gives_the_losses_of_one_process(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}\n" for i in range(3000)))
    words = [f"--run.data=text:{text}", "--run.length=48", "--run.steps=20", "--run.evaluate_every=5"]
    words += [
        "--run.learning_rate=0.01",
        "--run.evaluate_examples=8",
        "--run.save_every=10",
        "--model.dim=16",
        "--model.depth=2",
        "--run.batch=4",
    ]
    words += ["--model.heads=2", "--model.feedforward=32", "--model.attention=gated_deltanet", "--model.positions=none"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    sequence = ["--run.devices=2", "--run.strategy=fsdp", "--run.async_checkpoints=true", "--run.sequence_parallel=2"]
    assert main(["train", *words, f"--run.out={tmp_path / 'one'}/run"]) == 0
    command = [*torchrun, "longspan", "train", *words, *sequence, f"--run.out={tmp_path / 'sequence'}/run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    model = longspan.load(tmp_path / "sequence" / "run")
    assert longspan.generate(model, torch.zeros(1, 3, dtype=torch.long), max_new_tokens=4).shape == (1, 4)
    one, two = (rows(tmp_path / name) for name in ("one", "sequence"))
    assert [row["step"] for row in one] == [5, 10, 15, 20]
    assert one[-1]["loss"] < 0.9 * one[0]["loss"]
    for found, wanted in zip(two, one, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
