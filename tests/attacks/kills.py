"""Trainings killed at every file event, some once more while they go on: the end has the bits of one left in peace."""

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from longspan.models import checkpoint
from longspan.train import begun, fit
from training_process import TINY, tiny

SHORT, LONG = 3, 160
# What touches the disk, as Python's audit hooks tell; reading does no harm, and is an event too.
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")


def cases(seed: int, count: int, folder: Path) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """``count`` kills, evenly over the events of a run; every third is followed by one of the run that goes on."""
    events = _in_child(folder / "whole", counted=folder / "events")
    if events != 0:
        raise RuntimeError(f"the run that is not killed ended with {events}")
    total, draw = int((folder / "events").read_text()), random.Random(seed)
    for i in range(count):
        first = 1 + (i * total // count + draw.randrange(max(total // count, 1))) % total
        second = draw.randint(1, total) if i % 3 == 2 else 0
        yield f"event {first}" + f", then {second}" * bool(second), _case(folder, i, first, second)


def _case(folder: Path, i: int, first: int, second: int) -> Callable[[], str | None]:
    def run() -> str | None:
        at = folder / f"{i}"
        _in_child(at, kill=first)
        if second:
            _in_child(at, kill=second)
        if (code := _in_child(at)) != 0:
            return f"going on ended with {code}: {(at / 'said').read_text().strip().splitlines()[-1:]}"
        return _differ(folder / "whole" / "run", at / "run")

    return run


def _in_child(at: Path, *, kill: int = 0, counted: Path | None = None) -> int:
    """Train in a child of this process, which ends it at its event number ``kill``, as kill -9 would -> exit code."""
    at.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            done = 0

            def count(event: str, arguments: tuple) -> None:
                nonlocal done
                if event in EVENTS and str(arguments[0]).startswith(str(at / "run")):
                    done += 1
                    if done == kill:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            fit(TINY, tiny(at, steps=7, save_every=2, evaluate_every=3), resume=begun(at / "run"), progress=False)
            if counted:
                counted.write_text(str(done))
        except BaseException:
            (at / "said").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _differ(whole: Path, other: Path) -> str | None:
    for name in ("best", "last"):
        one, two = (checkpoint.resolve(folder, prefer=name) for folder in (whole, other))
        if one.name != two.name:
            return f"{name} is {two.name} instead of {one.name}"
        if (one / "model.safetensors").read_bytes() != (two / "model.safetensors").read_bytes():
            return f"the weights of {name}, {one.name}, differ"
        states = [checkpoint.load_training(folder)["optimizer_states"][0]["state"] for folder in (one, two)]
        if any(not torch.equal(states[0][i][key], states[1][i][key]) for i in states[0] for key in states[0][i]):
            return f"the optimizer's state of {name}, {one.name}, differs"
    left = sorted(path.name for path in other.rglob(".*"))
    return f"it left {left}" if left else None
