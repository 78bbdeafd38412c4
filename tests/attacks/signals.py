"""Commands ended by SIGINT, SIGTERM or SIGHUP, once or twice, at any moment: what they say they kept is whole."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from longspan.models import checkpoint
from longspan.models.decoder import Decoder
from training_process import TINY

SHORT, LONG = 1, 50
LIMIT = 200.0  # seconds that an end may take on a machine with much else to do
MODEL = [f"--model.{name}={value}" for name, value in TINY.to_dict().items()]
# command -> its words, in a folder that has a model; each would take minutes
COMMANDS = {
    "train": [*MODEL, "--run.steps=1000000", "--run.batch=3", "--run.save_every=50", "--run.evaluate_every=1000000"],
    "bench": [
        "gated",
        "delta",
        "--length=64",
        "--heads=2",
        "--size=8",
        "--rounds=20",
        "--batches=" + ",".join(map(str, range(1, 200))),
        "--out=o",
    ],
    "generate": ["mnist", "--count=256"],
    "reproduce": ["mqar", "--quick", "--steps=1500", "--specs=linear; softmax; gla", "--out=o"],
    "eval": ["model", "--split=train", "--stepwise=1000"],
}
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A shell's background jobs ignore Ctrl-C, and so would what they start.
START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from longspan.cli import main; print('begun', flush=True); sys.exit(main())"
)


def cases(seed: int, count: int, folder: Path) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """``count`` times one command and one signal, by turns, at a random moment; every third gets a second one."""
    with torch.random.fork_rng([]):
        checkpoint.save(Decoder(TINY), folder / "model", extra={"run": {"data": "digits", "length": 0}})
    draw = random.Random(seed)
    for i in range(count):
        name, number = list(COMMANDS)[i % len(COMMANDS)], ENDING[i // len(COMMANDS) % len(ENDING)]
        # Seconds of the processor, whatever else the machine does. Imports take some; every fourth comes meanwhile.
        after = draw.uniform(0.0, 3.0) if i % 4 == 3 else draw.uniform(3.0, 6.0)
        second = draw.uniform(0.0, 0.3) if i % 3 == 2 else None
        label = f"{i}: {name}, {number.name} after {after:.2f} s" + (
            f" and {second:.2f} s" if second is not None else ""
        )
        yield label, _case(folder, i, name, number, after, second)


def _case(folder: Path, i: int, name: str, number: int, after: float, second: float | None):
    def run() -> str | None:
        at = folder / f"{i}"
        at.mkdir()
        (at / "model").symlink_to(folder / "model", target_is_directory=True)
        process = start(at, name, *COMMANDS[name])
        seen = psutil.Process(process.pid)
        while process.poll() is None and sum(seen.cpu_times()[:2]) < after:
            time.sleep(0.01)
        for pause in (0.0, *([] if second is None else [second])):
            time.sleep(pause)
            process.send_signal(number)
        try:
            code = process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "it went on"
        return judged(at, name, code, number, twice=second is not None)

    return run


def start(at: Path, *words: str) -> subprocess.Popen:
    """Start the command ``longspan`` with default signal handlers; its output goes to the files out and err."""
    command = [sys.executable, "-W", "ignore:longspan runs without its native CPU kernels", "-c", START, *words]
    if words[0] == "train":
        command.append("--run.out=run")
    with (at / "out").open("w") as out, (at / "err").open("w") as err:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=at, stdout=out, stderr=err, env=environment, start_new_session=True)
    while process.poll() is None and not (at / "out").read_text():
        time.sleep(0.01)
    return process


def judged(at: Path, name: str, code: int, number: int, *, twice: bool) -> str | None:
    """What is wrong with a command that was ended by a signal; None where nothing is."""
    said, hidden = (at / "err").read_text(), [path.name for path in at.rglob(".*")]
    if code == 0 and not said and (at / "out").read_text().count("\n") > 1:
        return None  # a fast machine had done all of it before the signal came
    # The second one may come when all is said, or before there was anything to say.
    if code != 128 + number and not (code == -number and (twice or not said)):
        return f"its exit code is {code}; it said {said!r}"
    if "Traceback" in said or "Exception" in said:
        return f"it said {said!r}"
    if code > 0 and not re.search(r"^longspan: (interrupted|stopped at once)", said.splitlines()[-1]):
        return f"it said {said!r}"
    # An unlocked lock file does no harm, and what ends at once cannot remove it.
    if not twice and code > 0 and hidden:
        return f"it left {hidden}"
    for path in (at / "o").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        kept = f"{len(result['rows'])} figures so far" if name == "bench" else str(len(result["rows"]))
        if not twice and (result.get("partial", False) != (name == "bench") or (result["rows"] and kept not in said)):
            return f"it said {said!r} with {len(result['rows'])} rows in {path.name}"
    if name == "train" and not twice and (at / "run" / "config.yaml").exists():
        if "is saved in run; continue with: longspan train --config run/config.yaml --resume" not in said:
            return f"it said {said!r}"
        saved = checkpoint.resolve(at / "run", prefer="last")
        if f"{saved.name} is saved" not in said:
            return f"it said {said!r}, and the last one is {saved.name}"
        checkpoint.load(saved)
        checkpoint.load_training(saved)
    if name == "generate" and "pixels" in said and not (at / "samples.partial.png").exists():
        return f"it said {said!r}, and there is no such picture"
    return None
