"""Processes that train together: runs and data that differ are refused, and a process that stops ends the others."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields

import pytest
from torch import distributed as dist

import ranks
from longspan.cli import entry
from longspan.models import checkpoint
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, loop
from longspan.train.together import require_same
from training_process import HANGS, TINY

# What the second of three processes has -> the part of the message that names it.
DIFFERENT = {
    "value": ({"run.batch": 4, "model.dim": 8}, "run.batch is 2 in process 0 and 4 in process 1"),
    "missing": ({"model.dim": 8}, "run.batch is 2 in process 0 and 'absent' in process 1"),
    "more": ({"run.batch": 2, "model.dim": 8, "run.new": 1}, "run.new is 'absent' in process 0 and 1 in process 1"),
}
OPTIONS = {"dim": 8, "depth": 1, "heads": 2}, {"length": 16, "steps": 3, "batch": 2, "devices": 2}
# The first waited for ever, and one of the others trained on in silence.
SETTINGS = [{"strategy": "fsdp"}, {"seed": 1}, {"batch": 4}, {"learning_rate": 0.01}, {"steps": 4}, {"out": "other"}]


def compared(group, values):
    try:
        require_same(values[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return ""


def test_what_differs_is_named_in_all_processes():
    same = {"run.batch": 2, "model.dim": 8}
    with ranks.pool(3) as run:
        assert run(3, compared, [same, dict(reversed(same.items())), same]) == ["", "", ""]
        for other, message in DIFFERENT.values():
            found = run(3, compared, [same, other, same])
            assert len(set(found)) == 1
            assert message in found[0]


def begin(folder, *changes):
    """Processes as torchrun starts them, one for each of ``changes``, with their output in files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "t.txt").write_text("the old man and the sea\n" * 200)
    model, run = OPTIONS
    found = []
    for rank, more in enumerate(changes):
        words = [word for name, value in model.items() for word in (f"--model.{name}", str(value))]
        given = run | {"data": f"text:{folder / 't.txt'}", "evaluate_examples": 2, "out": "run"} | more
        words += [word for name, value in given.items() for word in (f"--run.{name}", str(value))]
        started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        started |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started |= {"OMP_NUM_THREADS": 1, "PYTHONWARNINGS": "ignore"}
        with (folder / f"err-{rank}").open("w") as err:
            command = [sys.executable, "-m", "longspan", "train", *words]
            environment = os.environ | {name: str(value) for name, value in started.items()}
            found.append(subprocess.Popen(command, cwd=folder, stdout=err, stderr=err, env=environment))
    return found


def ends(process, folder, rank):
    """The exit code and the last line of a process."""
    code = process.wait(HANGS)
    return code, (folder / f"err-{rank}").read_text().strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("other", SETTINGS, ids=lambda other: "-".join(other))
def test_other_settings_are_refused_before_anything_is_written(tmp_path, other):
    processes = begin(tmp_path, {}, other)
    (name, value), *_ = other.items()
    for rank, process in enumerate(processes):
        code, said = ends(process, tmp_path, rank)
        assert code == entry.WRONG
        assert f"run.{name} is" in said
        assert f"{value!r} in process 1" in said
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "other").exists()


def test_the_content_of_the_data_is_compared_too():
    model, run = Decoder(TINY), TrainConfig(devices=2)
    found = loop.strategy(model, run, {checkpoint.DATA: "abc"}, None, "gloo").same
    assert found[checkpoint.DATA] == "abc"
    assert {name for name in found if name.startswith("run.")} == {f"run.{field.name}" for field in fields(TrainConfig)}


def test_a_process_that_stops_ends_the_others(tmp_path):
    longer = {"steps": 100_000, "timeout": 5, "save_every": 2}
    processes = begin(tmp_path, longer, longer)
    try:
        end = time.monotonic() + HANGS
        while not (tmp_path / "run/checkpoints/last").exists():
            assert processes[0].poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGSTOP)
        code, said = ends(processes[0], tmp_path, 0)
        assert code == entry.WRONG
        assert "for another process longer than run.timeout=5 s" in said
    finally:
        for process in processes:
            process.kill()
            process.wait()
