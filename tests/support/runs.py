"""Training runs of tests: in a separate process, interrupted, and what they wrote."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import training_process
from longspan.train import fit, loop
from training_process import HANGS, TINY, tiny


def press_at(monkeypatch, index, times=1):
    """Ctrl-C while micro-batch number ``index`` is being worked on."""
    seed = loop.step_seed

    def pressed(run_seed, micro, rank):
        for _ in range(times if micro == index else 0):
            signal.raise_signal(signal.SIGINT)
        return seed(run_seed, micro, rank)

    monkeypatch.setattr(loop, "step_seed", pressed)


def fit_in_two(config, run, step, monkeypatch, times=1):
    """Train until Ctrl-C in a step, which it finishes and saves unless it comes twice, and resume."""
    with monkeypatch.context() as patch:
        press_at(patch, step - 1, times)
        with pytest.raises(KeyboardInterrupt):
            fit(config, run, progress=False)
    return fit(config, run, resume=True, progress=False)


def job(folder, *, resume=False, pause=0.0, dropout=0.1, model=None, double=False, writing=None, **fields):
    """A run in ``folder``, as ``training_process`` does it."""
    folder.mkdir(exist_ok=True)
    return {
        "model": model or TINY.to_dict() | {"dropout": dropout},
        "run": vars(tiny(folder, **fields)),
        "resume": resume,
        "pause": pause,
        "record": str(folder),
        "double": double,
        "writing": writing or {},
    }


def start(folder, **fields):
    """A process that trains in ``folder``, in a separate process group, with its output in the files out and err."""
    words = json.dumps(job(folder, **fields))
    command = [sys.executable, Path(__file__).parents[1] / "training_process.py", words]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        # The one warning that pyproject.toml lets pass, on a machine without a compiler.
        said_once = "ignore:longspan runs without its native CPU kernels:RuntimeWarning"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": said_once}
        return subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)


def trained(folder, **fields):
    """Train in ``folder`` to the end: in this process, unless the run needs several or a process group."""
    if fields.get("devices", 1) > 1 or fields.get("strategy", "auto") != "auto":
        finish(start(folder, **fields), folder)
    else:
        with pytest.MonkeyPatch.context() as patch:
            training_process.train(job(folder, **fields), patch.setattr)
    return folder


def finish(process, folder):
    assert process.wait(timeout=HANGS) == 0, (folder / "err").read_text()
    assert (folder / "out").read_text() == ""
    for line in (folder / "err").read_text().splitlines():
        assert re.match(r"[\d,]+ parameters, |step \d+(: training|/\d+, )|\d+ steps; best checkpoint: ", line), line


def wait_for(folder, process, step):
    """Until the checkpoint of ``step`` is the last one, or the process ends."""
    last = folder / "run" / "checkpoints" / "last"
    wait_while(lambda: not (last.exists() and int(last.read_text()[5:]) >= step), process, folder)


def wait_while(holds, process, folder):
    """Wait as long as a condition of a running process holds."""
    end = time.monotonic() + HANGS
    while process.poll() is None and time.monotonic() < end and holds():
        time.sleep(0.005)
    said = (folder / "err").read_text()
    assert process.poll() is None, said
    assert time.monotonic() < end, f"it hangs: {said}"


def rows(folder):
    """The rows of a run's metrics."""
    with (folder / "run" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))
