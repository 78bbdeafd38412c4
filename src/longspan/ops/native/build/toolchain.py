"""Runs the C++ compiler. It imports nothing of longspan, so that the build of a wheel can use it alone."""

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
from collections.abc import Generator
from pathlib import Path

FOLDER = Path(__file__).parents[1]
SOURCES = tuple(sorted(FOLDER.rglob("*.cpp")))
HEADERS = tuple(sorted(FOLDER.rglob("*.h")))
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
ARM = platform.machine() in ("arm64", "aarch64")
# Compilers for arm64 take -mcpu; some reject -march=native.
THIS_MACHINE = "-mcpu=native" if ARM else "-march=native"
CRASHES = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP")
SECONDS = 180  # timeout of the compiler, which needs up to ten seconds per file
VERSION_SECONDS = 20  # timeout of the compiler's --version


class Unavailable(Exception):
    """There are no native kernels; the message is the reason."""


class Hangs(Unavailable):
    """A program did not finish in time."""


class Crashed(Unavailable):
    """A program was terminated by a signal that its own code causes."""


def find_compiler() -> list[str]:
    """Return the C++ compiler as the start of a command: the environment variable CXX, or the first usual name.

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
    """Return the output of the compiler's --version. Raises Unavailable."""
    return run([*compiler, "--version"], seconds=VERSION_SECONDS)


def is_clang(compiler: list[str]) -> bool:
    """Return whether the compiler is a clang. Raises Unavailable."""
    return "clang" in version(compiler)


def flags(machine: str, *, openmp: bool) -> list[str]:
    """Return all flags, for the instruction set of the flags ``machine``, which spaces separate."""
    return [*FLAGS, *machine.split(), *(["-fopenmp"] if openmp else [])]


def sources(family: str) -> tuple[Path, ...]:
    """Return the sources of a family of kernels, which has the name of their folder."""
    return tuple(source for source in SOURCES if source.parent.name == family)


def compile(compiler: list[str], library: Path, machine: str, *, openmp: bool, family: str = "") -> str:
    """Compile and link the sources of ``family``, or all, into ``library``, with the flags ``machine`` of its set.

    OpenMP code of gcc is linked without a runtime: it uses the one that torch has loaded, under any file name, so there
    is never a second pool of threads (openmp.py). Code of clang needs clang's runtime.

    Returns:
        The flags, for display.

    Raises:
        Unavailable: the compiler failed; the message has its first error.
        Hangs: the compiler did not finish in time.
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
    """Return what a command prints. Raises Unavailable if it fails or crashes, Hangs if it does not finish."""
    return together([command], environment=environment, seconds=seconds)[0]


def together(
    commands: list[list[str]],
    folder: str | None = None,
    environment: dict[str, str] | None = None,
    seconds: float = 0,
) -> list[str]:
    """Run commands in parallel, one per core; return what each prints.

    Each may take ``seconds`` (0: SECONDS). Raises Unavailable if one fails or crashes, Hangs if one does not finish;
    the others are then terminated.
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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _started(
    command: list[str], folder: str | None, environment: dict[str, str] | None
) -> Generator[subprocess.Popen[str], None, None]:
    """Start a process in a new session, so that the programs a compiler starts are terminated with it."""
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
        raise Hangs(f"{name} did not finish in time") from error
    if not process.returncode:
        return out
    lines = (err or out).strip().splitlines() or ["it printed nothing"]
    # Compilers print details below the first error.
    line = next((line for line in lines if "error: " in line.lower()), lines[-1])
    if process.returncode > 0:
        raise Unavailable(f"{name} failed with code {process.returncode}: {line.strip()}")
    sent = signal.Signals(-process.returncode).name
    raise (Crashed if sent in CRASHES else Unavailable)(f"{name} was terminated by {sent}: {line.strip()}")
