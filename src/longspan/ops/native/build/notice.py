"""The line on stderr while a call waits for the compilation of kernels."""

import contextlib
import os
import threading
from collections.abc import Generator

from ...._utils.progress import say

QUIET = "LONGSPAN_QUIET"  # the environment variable that disables the line
AFTER = 2.0  # seconds of silence
ABOUT = 10  # seconds that a call waits on two cores

_compiled: dict[str, int] = {}  # how many threads compile kernels of this name, or wait for another process


@contextlib.contextmanager
def compiling(name: str) -> Generator[None, None, None]:
    """Say that the block compiles kernels: ``shown`` lists them."""
    _compiled[name] = _compiled.get(name, 0) + 1
    try:
        yield
    finally:
        _compiled[name] -= 1


def forget() -> None:
    """Forget compilations, in a forked process: its parent waits for them."""
    _compiled.clear()


@contextlib.contextmanager
def shown() -> Generator[None, None, None]:
    """Print one line if kernels are compiled after AFTER seconds of the block, unless QUIET is set."""
    timer = threading.Timer(AFTER, _print)
    timer.daemon = True
    if os.environ.get(QUIET, "0") in ("", "0"):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print() -> None:
    families = dict.fromkeys(name.partition("/")[0] for name, threads in list(_compiled.items()) if threads)
    if families:
        say(f"longspan: compiling CPU kernels ({', '.join(families)}) for this machine, once, about {ABOUT} s")
