"""Runs killed at every file event, some once more while they go on: the end has the bits of one left in peace."""

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

import longspan
from longspan import finetune, states
from longspan.models import checkpoint
from longspan.serving.text import Bytes
from longspan.train import begun, fit
from training_process import TINY, tiny

SHORT, LONG = 4, 240
# What touches the disk, as Python's audit hooks tell; reading does no harm, and is an event too.
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")


def train(at: Path) -> None:
    """Train a small decoder, or go on."""
    fit(TINY, tiny(at, **STEPS), resume=begun(at / "run"), progress=False)


def tune(at: Path) -> None:
    """Fine-tune the initial states of a small decoder, or go on."""
    config = longspan.DecoderConfig(
        dim=8, depth=1, heads=2, feedforward=8, vocab=256, attention="gla", positions="none"
    )
    torch.manual_seed(0)
    model = longspan.Decoder(config)
    (at / "data.txt").write_text("one and two are three\n" * 9, encoding="utf-8")
    options = {"vocab": 256, "start": model.start, "length": 24, "held": 0.3, "every": False, "packed": True}
    data = finetune.load(str(at / "data.txt"), Bytes(), **options)
    run = tiny(at, data=data.name, length=24, warmup=0, learning_rate=0.1, **STEPS)
    method = finetune.FinetuneConfig(method="state")
    finetune.finetune(model, data, method, run, resume=begun(at / "run"), progress=False)


STEPS = {"steps": 7, "save_every": 2, "evaluate_every": 3, "batch": 2}
RUNS = {"train": train, "finetune": tune}


def cases(seed: int, count: int, folder: Path) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """``count`` kills, evenly over the events of each run; every third is followed by one of the run that goes on."""
    draw = random.Random(seed)
    for number, (name, run) in enumerate(RUNS.items()):
        own, times = folder / name, count // len(RUNS) + (number < count % len(RUNS))
        own.mkdir()
        events = _in_child(run, own / "whole", counted=own / "events")
        if events != 0:
            raise RuntimeError(f"the {name} that is not killed ended with {events}: {(own / 'whole/said').read_text()}")
        total = int((own / "events").read_text())
        for i in range(times):
            first = 1 + (i * total // times + draw.randrange(max(total // times, 1))) % total
            second = draw.randint(1, total) if i % 3 == 2 else 0
            label = f"{name}, event {first}" + f", then {second}" * bool(second)
            yield label, _case(run, own, i, first, second)


def _case(run: Callable[[Path], None], folder: Path, i: int, first: int, second: int) -> Callable[[], str | None]:
    def case() -> str | None:
        at = folder / f"{i}"
        _in_child(run, at, kill=first)
        if second:
            _in_child(run, at, kill=second)
        if (code := _in_child(run, at)) != 0:
            return f"going on ended with {code}: {(at / 'said').read_text().strip().splitlines()[-1:]}"
        return _differ(folder / "whole" / "run", at / "run")

    return case


def _in_child(run: Callable[[Path], None], at: Path, *, kill: int = 0, counted: Path | None = None) -> int:
    """Make a run in a child process, which ends it at its event number ``kill``, as kill -9 would -> exit code."""
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
            run(at)
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
        kept = [checkpoint.load_training(folder)["optimizer_states"][0]["state"] for folder in (one, two)]
        if any(not torch.equal(kept[0][i][key], kept[1][i][key]) for i in kept[0] for key in kept[0][i]):
            return f"the optimizer's state of {name}, {one.name}, differs"
    adapters = [folder / "adapter.safetensors" for folder in (whole, other)]
    if adapters[0].exists():
        # Texts in the header of such a file have any order.
        (one, two), (here, there) = ([read(path) for path in adapters] for read in (load_file, states.read_metadata))
        if here != there or one.keys() != two.keys() or any(not torch.equal(one[name], two[name]) for name in one):
            return "adapter.safetensors differs"
    left = sorted(path.name for path in other.rglob(".*"))
    return f"it left {left}" if left else None
