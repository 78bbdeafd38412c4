"""Compiles the C++ kernels on first use, with the machine's own compiler, into a folder of the user's."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from ...folders import cache_folder

SOURCES = (Path(__file__).with_name("step.cpp"),)
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-std=c++17",
    "-shared",
    "-fPIC",
)
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # for the compiler, which needs about one


class Unavailable(Exception):
    """There are no native kernels here; the message says why."""


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """The kernels, compiled if need be; None, after one warning, where that cannot be done."""
    try:
        return load()
    except Unavailable as error:
        warnings.warn(f"longspan runs without its native CPU kernels: {error}", RuntimeWarning, stacklevel=2)
        return None


def load() -> ctypes.CDLL:
    """The kernels from the cache, else compiled into it. Raises Unavailable with the reason."""
    compiler = find_compiler()
    with contextlib.suppress(OSError):
        return _open(_cached(compiler, cache_folder() / "native"))
    # That folder cannot be used: a library of this process's own, whose file is not needed once it is loaded.
    try:
        with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
            return _open(_cached(compiler, Path(folder)))
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be stored or loaded: {error.strerror or error}") from error


def find_compiler() -> str:
    """The C++ compiler: the environment variable CXX, or the first of the usual names. Raises Unavailable."""
    if sys.platform == "win32":
        raise Unavailable("they are not built on Windows yet")
    chosen = os.environ.get("CXX", "")
    for name in (chosen,) if chosen else COMPILERS:
        if path := shutil.which(name):
            return path
    raise Unavailable(f"no C++ compiler {chosen or 'such as g++ or clang++'} was found; install one, or set CXX")


def key(compiler: str) -> str:
    """What the compiled code depends on: sources, flags, compiler, processor."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(source.read_bytes())
    for part in (*FLAGS, _run([compiler, "--version"]), platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _cached(compiler: str, folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{key(compiler)}.so"
    if not _trusted(path):
        _compile(compiler, path)
    return path


def _compile(compiler: str, path: Path) -> None:
    """Compile beside ``path`` and rename, so that a second process never sees half a file."""
    handle, name = tempfile.mkstemp(prefix=".", suffix=".so", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        command = [compiler, *FLAGS, *map(str, SOURCES), "-o", name]
        try:
            _run([*command, "-fopenmp"])
        except Unavailable:
            # Apple's clang has no OpenMP: one thread then.
            _run(command)
        temporary.chmod(0o600)
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
        seal = temporary.with_suffix(".sha256")
        seal.write_text(digest)
        seal.chmod(0o600)
        os.replace(seal, path.with_suffix(".sha256"))
        os.replace(temporary, path)
    finally:
        for leftover in (temporary, temporary.with_suffix(".sha256")):
            leftover.unlink(missing_ok=True)


def _trusted(path: Path) -> bool:
    """The file is there, is ours, nobody else may write it, and it is what was compiled."""
    with contextlib.suppress(OSError):
        found = path.stat()
        ours = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return ours and hashlib.sha256(path.read_bytes()).hexdigest() == path.with_suffix(".sha256").read_text()
    return False


def _open(path: Path) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(path))
    pointer, long = ctypes.c_void_p, ctypes.c_long
    opened.longspan_linear_step.argtypes = [pointer] * 5 + [long] * 3 + [ctypes.c_int, ctypes.c_float, ctypes.c_int]
    opened.longspan_linear_step.restype = ctypes.c_int
    return opened


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{command[0]} failed with code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return done.stdout


def _processor() -> str:
    """Model and features of the processor, since -march=native depends on them."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return "".join(sorted({line for line in file if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()
