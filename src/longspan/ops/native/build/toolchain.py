"""Runs the machine's C++ compiler. It imports nothing of longspan, so that the building of a wheel can use it alone."""

import collections
import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1]
SOURCES = tuple(sorted(FOLDER.rglob("*.cpp")))
HEADERS = tuple(sorted(FOLDER.rglob("*.h")))
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
ARM = platform.machine() in ("arm64", "aarch64")
# Compilers for arm64 know the machine by -mcpu; some refuse the other name.
THIS_MACHINE = "-mcpu=native" if ARM else "-march=native"
CRASHES = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP")
SECONDS = 180  # until a compiler counts as hanging; it needs up to ten for a file
SECONDS_TO_ANSWER = 20  # the same, for its name


class Unavailable(Exception):
    """There are no native kernels here; the message says why."""


class Hangs(Unavailable):
    """A program did not end in time."""


class Crashed(Unavailable):
    """A program was ended by one of the signals that its own code causes."""


def find_compiler() -> list[str]:
    """The C++ compiler, as the beginning of a command: the environment variable CXX, or the first of the usual names.

    Raises Unavailable.
    """
    if sys.platform == "win32":
        raise Unavailable("they are not built on Windows yet")
    chosen = os.environ.get("CXX", "")
    try:
        named = shlex.split(chosen)
    except ValueError as error:
        raise Unavailable(f"CXX={chosen!r} is not a command: {error}; quote it as in a shell, or unset CXX") from error
    for command in [named] if named else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    if named:
        raise Unavailable(f"the C++ compiler that CXX={chosen!r} names was not found; install it, or unset CXX")
    raise Unavailable("no C++ compiler such as g++ or clang++ was found; install one, or set CXX")


def version(compiler: list[str]) -> str:
    """What the compiler says of itself; its first line names it. Raises Unavailable."""
    return run([*compiler, "--version"], seconds=SECONDS_TO_ANSWER)


def is_clang(compiler: list[str]) -> bool:
    """Whether it is a clang, whatever its name. Raises Unavailable."""
    return "clang" in version(compiler)


def flags(machine: str, *, openmp: bool) -> list[str]:
    """All flags, for the instruction set of the flag ``machine``."""
    return [*FLAGS, machine, *(["-fopenmp"] if openmp else [])]


def sources(family: str) -> tuple[Path, ...]:
    """The sources of one family of kernels, which is named after their folder."""
    return tuple(source for source in SOURCES if source.parent.name == family)


def compile(compiler: list[str], library: Path, machine: str, *, openmp: bool, family: str = "") -> str:
    """Compile and link the sources of ``family``, or all, into ``library``, for the instruction set ``machine``.

    Code of gcc for OpenMP is linked without a runtime: it takes the one that torch has loaded, whatever its file is
    called, so there is never a second pool of threads (openmp.py). clang's needs the runtime of its own.

    Returns the flags, for people. Raises Unavailable with the compiler's last words, and Hangs.
    """
    used = flags(machine, openmp=openmp)
    runtime = ["-fopenmp"] if openmp and is_clang(compiler) else []
    with tempfile.TemporaryDirectory(prefix=".objects-", dir=library.parent) as folder:
        chosen = sources(family) if family else SOURCES
        # Numbered, since sources in different folders share names.
        objects = {str(source): str(Path(folder, f"{i}.o")) for i, source in enumerate(chosen)}
        together([[*compiler, *used, "-c", source, "-o", place] for source, place in objects.items()], folder=folder)
        run([*compiler, "-shared", *runtime, *objects.values(), "-o", str(library)])
    return " ".join(used)


def run(command: list[str], environment: dict[str, str] | None = None, seconds: float = 0) -> str:
    """What a command prints. Raises Unavailable where it fails or crashes, Hangs where it does not end."""
    return together([command], environment=environment, seconds=seconds)[0]


def together(
    commands: list[list[str]],
    folder: str | None = None,
    environment: dict[str, str] | None = None,
    seconds: float = 0,
) -> list[str]:
    """Run commands in parallel, as many at once as there are cores; return what each prints.

    Each may take ``seconds`` (0: SECONDS). Raises Unavailable if one fails or crashes, Hangs if one does not end; then
    none of them is left running.
    """
    seconds, printed = seconds or SECONDS, []
    running: collections.deque[tuple[str, subprocess.Popen[str], float]] = collections.deque()
    with contextlib.ExitStack() as stack:
        for command in commands:
            if len(running) == cores():
                printed.append(_result(*running.popleft()))
            process = stack.enter_context(_started(command, folder, environment))
            running.append((command[0], process, time.monotonic() + seconds))
        printed += [_result(*one) for one in running]
    return printed


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _started(
    command: list[str], folder: str | None, environment: dict[str, str] | None
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own: a compiler starts other programs, and they are ended together with it."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"{command[0]} does not run: {error}") from error
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _result(name: str, process: subprocess.Popen[str], end: float) -> str:
    try:
        out, err = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise Hangs(f"{name} does not end") from error
    if not process.returncode:
        return out
    said = (err or out).strip().splitlines() or ["it said nothing"]
    # Compilers say more below it.
    line = next((line for line in said if "error: " in line.lower()), said[-1])
    if process.returncode > 0:
        raise Unavailable(f"{name} failed with code {process.returncode}: {line.strip()}")
    sent = signal.Signals(-process.returncode).name
    raise (Crashed if sent in CRASHES else Unavailable)(f"{name} was ended by {sent}: {line.strip()}")
