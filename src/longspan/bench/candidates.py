"""What a benchmark compares: subjects in this process, and other libraries' in processes of their own."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from ..attention import plugins
from . import peers, worker
from .worker import Makers, Task

LEAST = 5e-3  # seconds that a sample should last at least; shorter calls are repeated
REPEATS = 1000  # at most
# An OpenMP team looks out for more work for about a millisecond, on cores that the next process needs; then it sleeps.
SETTLE = 0.01

Sampler = Callable[[int], float]
"""calls in a row -> seconds of one"""


class Refused(Exception):
    """A candidate failed; the message says how."""


class Candidate(Protocol):
    """Something to be checked, timed and weighed. Every method but ``release`` raises ``Refused``."""

    name: str
    ours: bool
    """longspan's own, whose failure is this package's"""

    def answer(self, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``worker.answer``."""
        ...

    def sampler(self, task: Task) -> Sampler:
        """Prepare; the result times that many calls in a row."""
        ...

    def memory(self, task: Task) -> float:
        """MB at the peak of one call; see ``worker.peak``."""
        ...

    def release(self) -> None:
        """Forget what was prepared."""
        ...


class Process:
    """A worker, started by its first request."""

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.running: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises Refused with the worker's error, or where it cannot start or has ended."""
        running = self.running or self._start()
        assert running.stdin is not None
        assert running.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            running.stdin.write(json.dumps(request) + "\n")
            running.stdin.flush()
            line = running.stdout.readline()
        if not line:
            raise Refused(self._ended(running.wait()))
        reply = json.loads(line)
        if "error" in reply:
            raise Refused(reply["error"])
        return reply

    def _start(self) -> subprocess.Popen[str]:
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8")
        pipe = subprocess.PIPE
        try:
            # In a group of its own: Ctrl-C is for this process, which then ends it with all that it has started.
            self.running = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, start_new_session=True
            )
        except OSError as error:
            self.close()
            raise Refused(f"cannot start {self.command[0]}: {error.strerror or error}") from error
        return self.running

    def _ended(self, code: int) -> str:
        assert self.errors is not None
        self.errors.seek(0)
        last = next((line.strip() for line in reversed(self.errors.readlines()) if line.strip()), "it said nothing")
        self.close()
        return f"its process ended with code {code}: {last}"

    def close(self) -> None:
        """End it, at once, also in the middle of a request."""
        running, errors, self.running, self.errors = self.running, self.errors, None, None
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL) if os.name == "posix" else running.kill()
            # A request that nobody took may still lie in the pipe.
            with contextlib.suppress(BrokenPipeError):
                running.communicate()
        if errors is not None:
            errors.close()


class Local:
    """A subject in this process; its memory is measured by ``weigher``, a process that finds it by its name."""

    def __init__(self, name: str, makers: Makers, weigher: Process, ours: bool = True):
        self.name, self.makers, self.weigher, self.ours = name, makers, weigher, ours

    def answer(self, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._safely(lambda: worker.answer(self.makers, task, given))

    def sampler(self, task: Task) -> Sampler:
        call = self._safely(lambda: worker.call(self.makers, task))
        return lambda repeat: self._safely(lambda: worker.timed(call, repeat))

    def memory(self, task: Task) -> float:
        return self.weigher.ask(do="memory", subject=self.name, task=task)["mb"]

    def release(self) -> None:
        """Nothing is kept."""

    def _safely(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        # Whatever a subject raises is a finding about it, as it is in a worker.
        except Exception as error:
            raise Refused(worker.told(error)) from error


class Remote:
    """Another library's subject: one process that is timed, and one for memory, which computes nothing itself."""

    ours = False

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self.timing, self.weigher = Process(command), Process(command)

    def about(self) -> dict[str, Any]:
        """Versions of what it is made of. Raises Refused."""
        return self.timing.ask(do="about", subject=self.name)

    def answer(self, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory(prefix="longspan-bench-") as folder:
            paths = {name: str(Path(folder) / f"{name}.pt") for name in ("given", "found")}
            torch.save(given, paths["given"])
            self.timing.ask(do="answer", subject=self.name, task=task, **paths)
            return torch.load(paths["found"], weights_only=True)

    def sampler(self, task: Task) -> Sampler:
        self.timing.ask(do="prepare", subject=self.name, task=task)

        def sample(repeat: int) -> float:
            time.sleep(SETTLE)
            seconds = self.timing.ask(do="run", repeat=repeat)["seconds"]
            time.sleep(SETTLE)
            return seconds

        return sample

    def memory(self, task: Task) -> float:
        return self.weigher.ask(do="memory", subject=self.name, task=task)["mb"]

    def release(self) -> None:
        if self.timing.running is not None:
            self.timing.ask(do="release")

    def close(self) -> None:
        """End both processes."""
        self.timing.close()
        self.weigher.close()


def repeated(sample: Sampler) -> tuple[Callable[[], float], int]:
    """Warm up, and repeat a short call so often that a sample lasts -> sampler, calls in a sample."""
    sample(1)
    seconds = sample(1)
    repeat = min(max(math.ceil(LEAST / max(seconds, 1e-9)), 1), REPEATS)
    return lambda: sample(repeat), repeat


def weigher() -> Process:
    """The process that measures the memory of this package's subjects."""
    code = "from longspan.bench import local, worker; worker.serve(local.find)"
    return Process([sys.executable, "-P", "-c", plugins.again() + code])


def find_peers(python: str, names: Sequence[str] = tuple(peers.SUBJECTS)) -> list[Remote]:
    """The other libraries' candidates, by the Python of the environment that holds them.

    ``python``: its path; "" takes the environment variable LONGSPAN_PEERS, else ``.venv-peers/bin/python``.
    Raises ValueError where there is none, or where it does not hold them.
    """
    path = python or os.environ.get("LONGSPAN_PEERS", "") or ".venv-peers/bin/python"
    if not Path(path).is_file():
        raise ValueError(
            f"there is no {path}; build the other libraries with: make peers, "
            f"or name the Python that has them: --peers-python PATH or LONGSPAN_PEERS=PATH"
        )
    command = [path, "-I", str(Path(worker.__file__)), str(Path(peers.__file__))]
    return [Remote(name, command) for name in names]


def versions(remotes: Sequence[Remote]) -> dict[str, str]:
    """What the other libraries are, by name. Raises ValueError where one of their processes cannot be used."""
    found: dict[str, str] = {}
    for remote in remotes:
        try:
            found |= {name: text for name, text in remote.about().items() if name not in ("python", "torch")}
        except Refused as error:
            raise ValueError(f"{remote.timing.command[0]} cannot serve the other libraries: {error}") from error
    return found
