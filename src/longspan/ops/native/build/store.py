"""Kernels compiled on this machine, in a folder of the user: tested once, sealed, and checked before each use."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ...._utils import atomic_io
from . import instruction_sets, notice, openmp, toolchain, trial, trusted
from .toolchain import Hangs, Unavailable

WAIT = 4 * toolchain.SECONDS  # for another process that compiles the same; longer than compilation and trial


@dataclass(frozen=True)
class Seal:
    """The record of one compilation."""

    compiler: str
    """the version line of the compiler"""
    flags: str = ""
    library: str = ""
    """file name of the library, in the folder of the seal"""
    sha256: str = ""
    """of the library"""
    failed: str = ""
    """why compilation or trial failed, so that it is not repeated; "" if there is a library"""
    family: str = ""
    """the family or the unit of kernels in the library"""


def nothing_more() -> Mapping[str, Path]:
    return {}


def provide(
    name: str,
    compiler: list[str],
    folder: Path,
    more: Callable[[], Mapping[str, Path]] = nothing_more,
    before: Callable[[], object] = nothing_more,
) -> tuple[Path, Seal]:
    """Return the library of a family or a unit for this compiler and processor, compiled and tested if needed.

    A library is complete once its seal exists, which is written last and renamed into place. If several processes need
    it, one compiles and the others wait. If files cannot be locked, each process compiles, and all results are valid.
    A compiler that hangs and a library that fails its trial are remembered.

    Args:
        name: The family or the unit.
        compiler: The start of a command.
        folder: Where libraries are kept.
        more: Returns the libraries that the trial needs besides, by name. Called after the compilation.
        before: Called before a compilation.

    Raises:
        Unavailable: the library cannot be provided.
        OSError: the folder cannot be used; Untrusted if other users could replace its contents.
    """
    folder = trusted.folder(folder)
    # No library in such a folder can be loaded.
    if hasattr(os, "ST_NOEXEC") and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise OSError(errno.EACCES, "its file system is mounted with the option noexec", str(folder))
    path = folder / f"{key(name, compiler)}.json"
    seal = read(path)
    if seal is None:
        with notice.compiling(name), _locked(path.with_suffix(".lock")):
            seal = read(path) or _make(name, compiler, folder, path, more, before)
    if seal.failed:
        raise Unavailable(f"{seal.failed} (run longspan doctor --clear to try again)")
    return folder / seal.library, seal


def key(name: str, compiler: list[str]) -> str:
    """Hash sources, flags, compiler, OpenMP, processor and the forced set. Raises Unavailable."""
    digest = hashlib.sha256(name.encode() + b"\0")
    for file in (*toolchain.sources(name), *toolchain.HEADERS, Path(toolchain.__file__)):
        digest.update(f"{file.parent.name}/{file.name}".encode() + b"\0" + file.read_bytes())
    shared = str(bool(openmp.share()))
    machine = (instruction_sets.target(), platform.machine(), processor())
    for part in (*toolchain.FLAGS, *compiler, toolchain.version(compiler), shared, *machine):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def read(path: Path) -> Seal | None:
    """Return the seal in a file; None unless it and its library are intact and only this user can write them."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        seal = Seal(**json.loads(trusted.content(path)))
        if seal.failed:
            return seal
        if Path(seal.library).name == seal.library:
            content = trusted.content(path.with_name(seal.library))
            if hashlib.sha256(content).hexdigest() == seal.sha256:
                return seal
    return None


def seals(folder: Path) -> list[Seal]:
    """Return all valid seals in a folder."""
    return [seal for path in sorted(folder.glob("*.json")) if (seal := read(path))]


@functools.cache
def processor() -> str:
    """Return model and features of the processor, on which the code for this machine depends."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return "".join(sorted({line for line in file if line.startswith(("model name", "flags", "Features", "CPU"))}))
    return platform.processor()


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None, None, None]:
    """Hold the lock file ``path``; continue without it after WAIT seconds, or if files cannot be locked."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = _lock(path)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _lock(path: Path) -> int | None:
    import fcntl  # not on Windows

    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            # Unlike a lock of flock, it is not inherited by a child that is forked meanwhile.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have deleted the file after it was opened here.
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.05)
    return None


def _make(
    name: str,
    compiler: list[str],
    folder: Path,
    path: Path,
    more: Callable[[], Mapping[str, Path]],
    before: Callable[[], object],
) -> Seal:
    place = folder / "compilation"
    # Folders of processes that were killed.
    atomic_io.tidy(place)
    with trial.ready(), atomic_io.new_folder(place, 0o700) as work:
        before()
        seal = _compiled(name, compiler, folder, work, more)
        written = work / path.name
        written.write_text(json.dumps(asdict(seal), indent=1), encoding="utf-8")
        _settle(written, path)
    return seal


def _compiled(name: str, compiler: list[str], folder: Path, work: Path, more: Callable[[], Mapping[str, Path]]) -> Seal:
    version = toolchain.version(compiler).partition("\n")[0]
    library = work / "kernels.so"
    try:
        flags = _compile(name, compiler, library)
        trial.run({**more(), name: library}, name)
    except (Hangs, trial.Failed) as error:
        return Seal(version, failed=str(error), family=name)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    settled = folder / f"{digest[:24]}.so"
    _settle(library, settled)
    return Seal(version, flags, settled.name, digest, family=name)


def _compile(name: str, compiler: list[str], library: Path) -> str:
    target = instruction_sets.target()
    if openmp.share() or toolchain.is_clang(compiler):
        try:
            return toolchain.compile(compiler, library, target, openmp=True, name=name)
        except Hangs:
            raise
        except Unavailable:
            # Apple's clang has no OpenMP, and other clangs may lack its runtime. Use one thread then.
            pass
    return toolchain.compile(compiler, library, target, openmp=False, name=name)


def _settle(file: Path, place: Path) -> None:
    file.chmod(0o600)
    os.replace(file, place)
