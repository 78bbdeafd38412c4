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
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, NamedTuple

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
KEPT = 2**15  # bytes at the beginning and at the end of what a program prints; the rest is dropped
SHOWN = 300  # characters of a line in a message

_running: set[subprocess.Popen[bytes]] = set()


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


def sources(name: str) -> tuple[Path, ...]:
    """Return the sources of a family of kernels, which has the name of their folder, or of a unit FAMILY/PART."""
    return tuple(one for one in SOURCES if name in (one.parent.name, f"{one.parent.name}/{one.stem}"))


def compile(compiler: list[str], library: Path, machine: str, *, openmp: bool, name: str = "") -> str:
    """Compile and link the sources of a family or a unit, by default all, into ``library``.

    ``machine``: the flags of its instruction set.

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
        chosen = sources(name) if name else SOURCES
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
    running: collections.deque[tuple[str, Program, float]] = collections.deque()
    with contextlib.ExitStack() as stack:
        for command in commands:
            if len(running) == cores():
                printed.append(result(*running.popleft()))
            program = stack.enter_context(started(command, folder, environment))
            running.append((command[0], program, time.monotonic() + seconds))
        printed += [result(*one) for one in running]
    return printed


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stop() -> None:
    """Terminate all programs that run."""
    for process in list(_running):
        _kill(process)


def forget() -> None:
    """Forget the programs that run, in a forked process: they belong to its parent."""
    _running.clear()


class _Printed:
    """What a program prints into a pipe, read by a thread. Only its beginning and its end are kept."""

    def __init__(self, pipe: IO[bytes]):
        self._pipe, self._kept = pipe, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe, contextlib.suppress(OSError, ValueError):
            while chunk := os.read(self._pipe.fileno(), 2**16):
                self._kept += chunk
                if len(self._kept) > 2 * KEPT:
                    self._kept = self._kept[:KEPT] + self._kept[-KEPT:]

    def ended(self) -> bool:
        """Return whether nothing more will come."""
        return not self._thread.is_alive()

    def so_far(self) -> str:
        """Return the text up to now."""
        return self._kept.decode(errors="replace")

    def text(self, end: float) -> str:
        """Return the text once the program ends. Raises TimeoutError."""
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError
        return self.so_far()


class Program(NamedTuple):
    """A process that runs, and what it prints."""

    process: subprocess.Popen[bytes]
    out: _Printed
    err: _Printed


@contextlib.contextmanager
def started(
    command: list[str], folder: str | None = None, environment: dict[str, str] | None = None, stdin: bool = False
) -> Generator[Program, None, None]:
    """Start a process in a new session, so that the programs a compiler starts are terminated with it."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"{command[0]} does not run: {error}") from error
    _running.add(process)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        yield Program(process, _Printed(process.stdout), _Printed(process.stderr))
    finally:
        if process.returncode is None:
            _kill(process)
            process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        _running.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def result(name: str, program: Program, end: float) -> str:
    """Return what a program prints, once it ends. Raises as ``run`` does."""
    try:
        out, err = program.out.text(end), program.err.text(end)
        code = program.process.wait(max(0.0, end - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise Hangs(f"{name} did not finish in time") from error
    if not code:
        return out
    lines = (err or out).strip().splitlines() or ["it printed nothing"]
    # Compilers print details below the first error.
    line = next((line for line in lines if "error: " in line.lower()), lines[-1]).strip()
    line = line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
    if code > 0:
        raise Unavailable(f"{name} failed with code {code}: {line}")
    sent = signal.Signals(-code).name
    raise (Crashed if sent in CRASHES else Unavailable)(f"{name} was terminated by {sent}: {line}")
