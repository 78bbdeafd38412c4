"""Kernels compiled on this machine, in a folder of the user's: tried once, sealed, and checked before each use."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from . import openmp, toolchain, trial, trusted
from .toolchain import Hangs, Unavailable


@dataclass(frozen=True)
class Seal:
    """What is known of one compilation."""

    compiler: str
    """what the compiler calls itself"""
    flags: str = ""
    library: str = ""
    """name of the library, beside the seal"""
    sha256: str = ""
    """of the library"""
    failed: str = ""
    """why there is no library and none is to be tried again; "" where there is one"""


def provide(compiler: list[str], folder: Path) -> tuple[Path, Seal]:
    """The library of a folder for these sources, this compiler and this processor; compiled and tried if need be.

    A library is there when its seal is, which is written last and renamed into place: two processes at once do the same
    work twice, and either result serves both. A compiler that hangs and a library that fails its trial are remembered.

    Raises Unavailable with the reason, and OSError for a folder that cannot be used: Untrusted where other users might
    exchange what is in it.
    """
    folder = trusted.folder(folder)
    path = folder / f"{key(compiler)}.json"
    seal = read(path)
    if seal is None:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as work:
            seal = _make(compiler, folder, Path(work))
            written = Path(work, path.name)
            written.write_text(json.dumps(asdict(seal), indent=1), encoding="utf-8")
            _settle(written, path)
    if seal.failed:
        raise Unavailable(f"{seal.failed} (longspan doctor --clear has it tried again)")
    return folder / seal.library, seal


def key(compiler: list[str]) -> str:
    """What the compiled code depends on: sources, commands, compiler, torch's OpenMP, processor. Raises Unavailable."""
    digest = hashlib.sha256()
    for file in (*toolchain.SOURCES, *toolchain.HEADERS, Path(toolchain.__file__)):
        digest.update(f"{file.parent.name}/{file.name}".encode() + b"\0" + file.read_bytes())
    shared = str(bool(openmp.share()))
    machine = (toolchain.THIS_MACHINE, platform.machine(), processor())
    for part in (*toolchain.FLAGS, *compiler, toolchain.version(compiler), shared, *machine):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def read(path: Path) -> Seal | None:
    """The seal in a file; None unless it, and the library that it names, are whole and nobody else may write them."""
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
    """All that are valid in a folder."""
    return [seal for path in sorted(folder.glob("*.json")) if (seal := read(path))]


@functools.cache
def processor() -> str:
    """Model and features of the processor, on which the flags for this machine depend."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return "".join(sorted({line for line in file if line.startswith(("model name", "flags", "Features", "CPU"))}))
    return platform.processor()


def _make(compiler: list[str], folder: Path, work: Path) -> Seal:
    name = toolchain.version(compiler).partition("\n")[0]
    library = work / "kernels.so"
    try:
        flags = _compile(compiler, library)
        trial.run(library)
    except (Hangs, trial.Failed) as error:
        return Seal(name, failed=str(error))
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    settled = folder / f"{digest[:24]}.so"
    _settle(library, settled)
    return Seal(name, flags, settled.name, digest)


def _compile(compiler: list[str], library: Path) -> str:
    if openmp.share() or toolchain.is_clang(compiler):
        try:
            return toolchain.compile(compiler, library, toolchain.THIS_MACHINE, openmp=True)
        except Hangs:
            raise
        except Unavailable:
            # Apple's clang has no OpenMP, and others' may lack its runtime: one thread then.
            pass
    return toolchain.compile(compiler, library, toolchain.THIS_MACHINE, openmp=False)


def _settle(file: Path, place: Path) -> None:
    file.chmod(0o600)
    os.replace(file, place)
