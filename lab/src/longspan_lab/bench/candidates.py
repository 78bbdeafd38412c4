"""Candidates of a benchmark: subjects in this process, and those of other libraries in separate processes."""

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

from longspan.attention import plugins

from . import peers, worker
from .worker import Makers, Task

LEAST = 5e-3  # smallest duration of a sample in seconds; shorter calls are repeated
REPEATS = 1000  # largest number of calls in a sample
# An idle OpenMP team spins for about a millisecond before it sleeps, on cores that the next process needs.
SETTLE = 0.01

Sampler = Callable[[int], float]
"""number of consecutive calls -> seconds per call"""


class Refused(Exception):
    """A candidate failed; the message has the reason."""


class Candidate(Protocol):
    """A candidate that is checked, timed and measured for memory. All methods but ``release`` raise ``Refused``."""

    name: str
    ours: bool
    """whether it belongs to longspan, so that a failure is a bug of this package"""

    def answer(self, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``worker.answer``."""
        ...

    def sampler(self, task: Task) -> Sampler:
        """Prepare a task; the result times a number of consecutive calls."""
        ...

    def memory(self, task: Task) -> float:
        """Peak memory of one call in MB; see ``worker.peak``."""
        ...

    def release(self) -> None:
        """Release prepared tasks."""
        ...


class Process:
    """A worker process, started by its first request."""

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.running: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the reply. Raises Refused for an error reply, or if the worker does not run."""
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
            # A separate process group, since Ctrl-C is for this process, which then ends the whole group.
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
        """End the process immediately, also during a request."""
        running, errors, self.running, self.errors = self.running, self.errors, None, None
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL) if os.name == "posix" else running.kill()
            # An unread request may still be in the pipe.
            with contextlib.suppress(BrokenPipeError):
                running.communicate()
        if errors is not None:
            errors.close()


class Local:
    """A subject in this process; ``weigher``, a separate process, measures its memory."""

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
        """Nothing to release."""

    def _safely(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        # Any error of a subject refuses it, as in a worker.
        except Exception as error:
            raise Refused(worker.one_line(error)) from error


class Remote:
    """A subject of another library: a process for timing, and one for memory."""

    ours = False

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self.timing, self.weigher = Process(command), Process(command)

    def about(self) -> dict[str, Any]:
        """Versions of the library and its dependencies. Raises Refused."""
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
    """Warm up and choose the number of calls per sample; return the sampler and this number."""
    sample(1)
    seconds = sample(1)
    repeat = min(max(math.ceil(LEAST / max(seconds, 1e-9)), 1), REPEATS)
    return lambda: sample(repeat), repeat


def weigher() -> Process:
    """The process that measures the memory of this package's subjects."""
    code = "from longspan_lab.bench import local, worker; worker.serve(local.find)"
    return Process([sys.executable, "-P", "-c", plugins.again() + code])


def find_peers(python: str, names: Sequence[str] = tuple(peers.SUBJECTS)) -> list[Remote]:
    """The candidates of other libraries, run by the Python of their environment.

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
    """Versions of the other libraries, by name. Raises ValueError if one of their processes fails."""
    found: dict[str, str] = {}
    for remote in remotes:
        try:
            found |= {name: text for name, text in remote.about().items() if name not in ("python", "torch")}
        except Refused as error:
            raise ValueError(f"{remote.timing.command[0]} cannot run the other libraries: {error}") from error
    return found
