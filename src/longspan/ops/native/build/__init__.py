"""Loads the C++ kernels, a family at a time: from the installation, else compiled on this machine on first use."""

import ctypes
import os
import sys
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from ...._utils.cache_dirs import cache_folder
from . import interface, openmp, prebuilt, store, toolchain, trusted
from .interface import FAMILIES as FAMILIES
from .toolchain import Unavailable
from .trusted import Untrusted

_locks = {family: threading.Lock() for family in FAMILIES}
_found: dict[str, ctypes.CDLL | None] = {}  # by family, from its first call on
_failed: dict[str, str] = {}  # why there is None


def _renew_locks() -> None:
    _locks.update((family, threading.Lock()) for family in FAMILIES)


if sys.platform != "win32":
    # A thread that is loading while another one forks holds the lock for ever in the child.
    os.register_at_fork(after_in_child=_renew_locks)


@dataclass(frozen=True)
class Kernels:
    """The library of a family, and where it comes from."""

    library: ctypes.CDLL
    origin: str
    """who compiled them, in a few words"""
    flags: str
    path: str
    why: str
    """why these and no others"""
    distrust: str = ""
    """why the cache folder is not used, where other users might write into it or it has no meaning"""


def loaded(family: str) -> ctypes.CDLL | None:
    """The kernels of a family, compiled if need be; None, after a warning, if that fails. Thread-safe.

    A failure leaves the other families usable. One that holds for all of them, such as no compiler, warns once.
    """
    if family not in _found:
        with _locks[family]:
            if family not in _found:
                _found[family] = _load_or_warn(family)
    return _found[family]


def tried() -> tuple[str, ...]:
    """The families that ``loaded`` was called for."""
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
    """The kernels of a family, with their functions declared; warns if the cache folder cannot be used.

    Raises Unavailable with the reason.
    """
    found = find(family)
    if found.distrust:
        warnings.warn(
            f"longspan compiled its native CPU kernels for this process alone, since the cache folder cannot be used: "
            f"{found.distrust}; set LONGSPAN_CACHE to a folder of your own",
            RuntimeWarning,
            stacklevel=4,
        )
    return found.library


def find(family: str) -> Kernels:
    """The kernels of the installation, else of the cache, else compiled into it. Raises Unavailable with the reason.

    Prebuilt kernels come first, although code for exactly this processor can be a little faster: they are there at
    once, they are the ones that were tested, and all machines with one of them compute the same bits. An installation
    from source brings none, and has the others.
    """
    why = "this installation brings none prebuilt"
    try:
        if path := prebuilt.find():
            flags = " ".join(toolchain.flags(f"-march={path.stem}", openmp=prebuilt.THREADED))
            best = f"{path.stem} is the best of the instruction sets that this processor and the installation have"
            return Kernels(_open(path, family), f"prebuilt for {path.stem}", flags, str(path), best)
    except (Unavailable, OSError) as error:
        why = f"the prebuilt ones cannot be used: {error}"
    try:
        return _compiled(family, why)
    except Unavailable as error:
        raise Unavailable(f"{why}; {error}" if prebuilt.FOLDER.is_dir() else str(error)) from error


def _compiled(family: str, why: str) -> Kernels:
    compiler = toolchain.find_compiler()
    distrust = ""
    try:
        folder = cache_folder() / "native"
        return _described(family, *store.provide(family, compiler, folder), why)
    # A LONGSPAN_CACHE that has no meaning.
    except ValueError as error:
        distrust = str(error)
        why += f"; {error}"
    except OSError as error:
        distrust = str(error) if isinstance(error, Untrusted) else ""
        why += f"; nothing can be kept in {folder}{f', since {error}' if distrust else ''}"
    # A library of this process's own, whose file is not needed once it is loaded.
    try:
        with tempfile.TemporaryDirectory(prefix="longspan-") as temporary:
            return _described(family, *store.provide(family, compiler, Path(temporary)), why, distrust)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be stored or loaded: {error.strerror or error}") from error


def _described(family: str, path: Path, seal: store.Seal, why: str, distrust: str = "") -> Kernels:
    library = _open(trusted.library(path, seal.sha256), family)
    return Kernels(library, f"compiled here by {seal.compiler}", seal.flags, str(path), why, distrust)


def _open(path: str | Path, family: str) -> ctypes.CDLL:
    """Raises OSError for a file that is no library of this system or lacks a function."""
    openmp.share()
    try:
        return interface.declare(ctypes.CDLL(str(path)), family)
    except AttributeError as error:
        raise OSError(str(error)) from error
