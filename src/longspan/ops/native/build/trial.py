"""The first calls of newly compiled kernels, in a child process, which may crash."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from . import toolchain

# Printed by selftest, which only the child process imports.
PASSED, WRONG = "these kernels are correct", "these kernels are wrong: "
# Adds the trial of the decode kernels, which needs whole models; the child process imports it.
DECODE = "longspan.generation.native_trial"


class Failed(toolchain.Unavailable):
    """The kernels were compiled but do not work."""


def run(libraries: Mapping[str, Path], tested: str) -> None:
    """Test kernels in a child process.

    Args:
        libraries: The library of each family or unit that the test needs.
        tested: The family or the unit to test.

    Raises:
        Failed: the kernels crash, hang or compute wrong values.
        Unavailable: the child process does not work.
    """
    request = {"libraries": {name: str(path) for name, path in libraries.items()}, "tested": tested}
    try:
        with ready(), _turn:
            printed = _asked(json.dumps(request))
    except (toolchain.Crashed, toolchain.Hangs) as error:
        raise Failed(f"the compiled kernels failed their trial: {error}") from error
    except toolchain.Unavailable as error:
        raise toolchain.Unavailable(f"the compiled kernels cannot be tested: {error}") from error
    if WRONG in printed:
        raise Failed(f"the compiled kernels failed their trial: {printed.partition(WRONG)[2].strip()}")
    if PASSED not in printed:
        raise toolchain.Unavailable(
            f"the compiled kernels cannot be tested: {sys.executable} is not a Python interpreter"
        )


class _Child:
    """A Python process that tests one library after the other: a line of JSON in, a line of text out."""

    def __init__(self) -> None:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        code = f"import {DECODE}; from {__package__} import selftest; selftest.main()"
        # A thread of OpenMP that waits leaves its core to the compiler.
        environment = os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-P", "-W", "ignore", "-c", code]
        self._stack, self._lines = contextlib.ExitStack(), 0
        self._program = self._stack.enter_context(toolchain.started(command, environment=environment, stdin=True))

    def ask(self, line: str) -> str:
        """Return the answer to a line. Raises as ``toolchain.run`` does; the child then has ended, or must end."""
        process, out, _ = self._program
        end = time.monotonic() + toolchain.SECONDS
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
        while time.monotonic() < end and not out.ended():
            if len(lines := out.so_far().split("\n")) > self._lines + 1:
                self._lines += 1
                return lines[self._lines - 1]
            time.sleep(0.01)
        return toolchain.result(sys.executable, self._program, end)

    def end(self) -> None:
        self._stack.close()


_guard, _turn = threading.Lock(), threading.Lock()  # of the two variables below; held during a test
_child: _Child | None = None
_users = 0


@contextlib.contextmanager
def ready() -> Generator[None, None, None]:
    """Keep the child process inside the block. It needs seconds to import torch, while a compiler works."""
    global _users
    with _guard:
        _users += 1
    try:
        # ``run`` reports a child that cannot start.
        with contextlib.suppress(toolchain.Unavailable):
            _started()
        yield
    finally:
        with _guard:
            _users -= 1
            if not _users:
                _end()


def forget() -> None:
    """Let go of the child and the locks, in a forked process: they belong to its parent."""
    global _guard, _turn, _child, _users
    _guard, _turn, _child, _users = threading.Lock(), threading.Lock(), None, 0


def _started() -> _Child:
    global _child
    with _guard:
        if _child is None:
            _child = _Child()
        return _child


def _end() -> None:
    global _child
    if _child is not None:
        _child.end()
    _child = None


def _asked(line: str) -> str:
    child = _started()
    try:
        answer = child.ask(line)
    except toolchain.Unavailable:
        with _guard:
            _end()
        raise
    if PASSED not in answer and WRONG not in answer:
        with _guard:
            _end()
    return answer
