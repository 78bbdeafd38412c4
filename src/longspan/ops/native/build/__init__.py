"""Loads the C++ kernels of a family: from the installation, else compiled on this machine on first use."""

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from ...._utils.cache_dirs import cache_folder
from . import instruction_sets, interface, openmp, prebuilt, store, toolchain, trusted
from .interface import FAMILIES as FAMILIES
from .toolchain import Unavailable
from .trusted import Untrusted

STAGED = ("linear", "gated", "general", "scan", "convolution")  # families whose kernels measure their time by stage
CLOCKS = 256  # threads that they measure, as in shared/stages.h

_locks = {family: threading.Lock() for family in FAMILIES}
_found: dict[str, ctypes.CDLL | None] = {}  # by family, filled on first use
_failed: dict[str, str] = {}  # the reason for None


def _renew_locks() -> None:
    _locks.update((family, threading.Lock()) for family in FAMILIES)


if sys.platform != "win32":
    # A lock that another thread holds during a fork is never released in the child.
    os.register_at_fork(after_in_child=_renew_locks)


@dataclass(frozen=True)
class Kernels:
    """The library of a family and its origin."""

    library: ctypes.CDLL
    origin: str
    """where the kernels were compiled, and by which compiler"""
    flags: str
    path: str
    why: str
    """why these kernels were chosen"""
    distrust: str = ""
    """why the cache folder is not used, if it is unsafe or its name is invalid"""
    isa: str = ""
    """the best instruction set whose code the library contains, as the library reports"""


def loaded(family: str) -> ctypes.CDLL | None:
    """Return the kernels of a family, compiled if needed; None, with a warning, if that fails. Thread-safe.

    After a failure the other families stay usable. A failure that affects all of them, such as a missing compiler,
    warns once.
    """
    if family not in _found:
        with _locks[family]:
            if family not in _found:
                _found[family] = _load_or_warn(family)
    return _found[family]


def tried() -> tuple[str, ...]:
    """Return the families for which ``loaded`` was called."""
    return tuple(_found)


def _load_or_warn(family: str) -> ctypes.CDLL | None:
    try:
        return load(family)
    except Unavailable as error:
        known = [_failed.get(other) for other, library in list(_found.items()) if library is None]
        _failed[family] = str(error)
        if str(error) not in known:
            warnings.warn(f"longspan runs without its native CPU kernels: {error}", RuntimeWarning, stacklevel=3)
        return None


def load(family: str) -> ctypes.CDLL:
    """Return the kernels of a family with declared functions; warns if the cache folder cannot be used.

    Raises Unavailable with the reason.
    """
    found = find(family)
    if found.distrust:
        warnings.warn(
            f"longspan compiled its native CPU kernels for this process only, since the cache folder cannot be used: "
            f"{found.distrust}; set LONGSPAN_CACHE to a folder that you own",
            RuntimeWarning,
            stacklevel=4,
        )
    return found.library


def find(family: str) -> Kernels:
    """Return the kernels of the installation, else of the cache, else compile them into the cache.

    Prebuilt kernels come first, although code for this exact processor can be slightly faster. They need no
    compilation, they were tested, and all machines with the same library compute the same bits. An installation from
    source contains none. The environment variable LONGSPAN_ISA forces an instruction set, for both.

    Raises Unavailable with the reason.
    """
    forced = instruction_sets.forced()
    why = "this installation contains no prebuilt kernels"
    try:
        if shipped := prebuilt.find():
            path, chosen = shipped
            flags = " ".join(toolchain.flags(chosen.flags, openmp=prebuilt.THREADED))
            best = f"{chosen.name} is the best instruction set that both this processor and the installation have"
            why = best if forced is None else _forces(forced.name)
            library = _open(path, family)
            isa = instruction_sets.of(library)
            return Kernels(library, f"prebuilt for {chosen.name}", flags, str(path), why, isa=isa)
    except (Unavailable, OSError) as error:
        why = f"the prebuilt kernels cannot be used: {error}"
    if forced is not None:
        why += f"; {_forces(forced.name)}"
    try:
        return _compiled(family, why)
    except Unavailable as error:
        raise Unavailable(f"{why}; {error}" if prebuilt.FOLDER.is_dir() else str(error)) from error


def _forces(name: str) -> str:
    return f"{instruction_sets.VARIABLE}={name} forces this instruction set"


def staged(family: str) -> ctypes.CDLL:
    """Return kernels of a family that measure their time by stage, as shared/stages.h describes; slower than others.

    They are always compiled on this machine, since no installation contains them. ``using`` puts them to use.

    Raises:
        Unavailable: they cannot be compiled.
        ValueError: the kernels of this family have no stages.
    """
    if family not in STAGED:
        raise ValueError(f"the kernels of the family {family!r} do not measure stages; those of {STAGED} do")
    library = _compiled(family, "they measure stages", "-DLONGSPAN_STAGES").library
    library.longspan_stages.restype, library.longspan_stages.argtypes = interface.INT, (interface.POINTER,)
    library.longspan_stage_count.restype, library.longspan_stage_count.argtypes = interface.INT, ()
    return library


@contextlib.contextmanager
def using(family: str, library: ctypes.CDLL) -> Generator[None, None, None]:
    """Use other kernels of a family inside the block, in all threads."""
    before = loaded(family)
    _found[family] = library
    try:
        yield
    finally:
        _found[family] = before


def _compiled(family: str, why: str, *options: str) -> Kernels:
    compiler = [*toolchain.find_compiler(), *options]
    distrust, folder = "", None
    try:
        folder = cache_folder() / "native"
        return _described(family, *store.provide(family, compiler, folder), why)
    # An invalid LONGSPAN_CACHE.
    except ValueError as error:
        distrust = str(error)
        why += f"; {error}"
    except OSError as error:
        distrust = str(error) if isinstance(error, Untrusted) else ""
        why += f"; {folder or 'the cache folder'} cannot be used{f': {error}' if distrust else ''}"
    # A library for this process only. Its file is not needed once it is loaded.
    try:
        with tempfile.TemporaryDirectory(prefix="longspan-") as temporary:
            return _described(family, *store.provide(family, compiler, Path(temporary)), why, distrust)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be stored or loaded: {error.strerror or error}") from error


def _described(family: str, path: Path, seal: store.Seal, why: str, distrust: str = "") -> Kernels:
    library = _open(trusted.library(path, seal.sha256), family)
    isa, forced = instruction_sets.of(library), instruction_sets.forced()
    # CXX can contain flags such as -mno-avx512f.
    if forced is not None and isa not in ("", forced.name):
        raise Unavailable(
            f"{instruction_sets.VARIABLE}={forced.name}, but the compiler generates code for {isa}; "
            f"remove -m flags from CXX, or pass {instruction_sets.VARIABLE}={isa}"
        )
    return Kernels(library, f"compiled here by {seal.compiler}", seal.flags, str(path), why, distrust, isa)


def _open(path: str | Path, family: str) -> ctypes.CDLL:
    """Open a library and declare its functions; raises OSError for an invalid file or a missing function."""
    openmp.share()
    try:
        return interface.declare(ctypes.CDLL(str(path)), family)
    except AttributeError as error:
        raise OSError(str(error)) from error
