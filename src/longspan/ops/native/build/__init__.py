"""Loads the C++ kernels of a unit: from the installation, else compiled on this machine on first use."""

import atexit
import contextlib
import ctypes
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ...._utils import cache_dirs
from . import instruction_sets, interface, notice, openmp, prebuilt, store, toolchain, trial, trusted
from .interface import FAMILIES as FAMILIES
from .interface import UNITS as UNITS
from .toolchain import Unavailable

STAGED = ("linear", "gated", "general", "scan", "convolution")  # families whose kernels measure their time by stage
CLOCKS = 256  # threads that they measure, as in shared/stages.h
NICE = 5  # by how much the priority of what no call waits for yet is lower

_locks: dict[str, threading.RLock] = {}  # by unit or family
_found: dict[str, ctypes.CDLL | None] = {}  # by unit, filled on first use
_failed: dict[str, str] = {}  # the reason for None
_warned: set[str] = set()  # about cache folders
_expected: dict[str, None] = {}  # families that modules of this process will use
_threads: dict[str, threading.Thread] = {}  # which compile ahead, by unit
_ahead = threading.BoundedSemaphore(toolchain.cores())  # of these threads, those that run
_closing = threading.Event()


def _renew() -> None:
    global _ahead
    _locks.clear()
    _ahead = threading.BoundedSemaphore(toolchain.cores())
    _threads.clear()
    trial.forget()
    notice.forget()
    toolchain.forget()


if sys.platform != "win32":
    # A lock that another thread holds during a fork is never released in the child.
    os.register_at_fork(after_in_child=_renew)


@atexit.register
def _stop() -> None:
    """End the compilations that no call waits for, and remove their folders."""
    _closing.set()
    running = [thread for thread in _threads.values() if thread.is_alive()]
    if running:
        toolchain.stop()
    end = time.monotonic() + 2.0
    for thread in running:
        thread.join(max(0.0, end - time.monotonic()))


@dataclass(frozen=True)
class Kernels:
    """The library of a unit and its origin."""

    library: ctypes.CDLL
    origin: str
    """where the kernels were compiled, and by which compiler"""
    flags: str
    path: str
    why: str
    """why these kernels were chosen"""
    unusable: str = ""
    """the folders that could not be used, why, and what happens instead"""
    isa: str = ""
    """the best instruction set whose code the library contains, as the library reports"""


def loaded(unit: str) -> ctypes.CDLL | None:
    """Return the kernels of a unit, compiled if needed; None, with a warning, if that fails. Thread-safe.

    After a failure the other units stay usable. A failure that affects all of them, such as a missing compiler, warns
    once. A compilation begins those of the units that will be needed next: see ``expect``.
    """
    if unit not in _found:
        with notice.shown(), _lock(unit):
            if unit not in _found:
                _found[unit] = _load_or_warn(unit)
    return _found[unit]


def _lock(name: str) -> threading.RLock:
    return _locks.setdefault(name, threading.RLock())


def expect(*families: str) -> None:
    """Note that a module of this process will use these families: the first compilation compiles them in parallel."""
    _expected.update(dict.fromkeys(families))


def tried() -> tuple[str, ...]:
    """Return the units for which ``loaded`` was called."""
    return tuple(_found)


def _load_or_warn(unit: str) -> ctypes.CDLL | None:
    try:
        return load(unit)
    except Unavailable as error:
        known = [_failed.get(other) for other, library in list(_found.items()) if library is None]
        _failed[unit] = str(error)
        if str(error) not in known:
            warnings.warn(f"longspan runs without its native CPU kernels: {error}", RuntimeWarning, stacklevel=3)
        return None


def load(unit: str) -> ctypes.CDLL:
    """Return the kernels of a unit with declared functions; warns, once, if the cache folder cannot be used.

    Raises Unavailable with the reason.
    """
    found = find(unit)
    if found.unusable and found.unusable not in _warned:
        _warned.add(found.unusable)
        warnings.warn(found.unusable, RuntimeWarning, stacklevel=4)
    return found.library


def find(unit: str) -> Kernels:
    """Return the kernels of the installation, else of the cache, else compile them into the cache.

    Prebuilt kernels come first, although code for this exact processor can be slightly faster. They need no
    compilation, they were tested, and all machines with the same library compute the same bits. An installation from
    source contains none. The environment variable LONGSPAN_ISA forces an instruction set, for both.

    Raises Unavailable with the reason.
    """
    return _find(unit, partial(_begin, unit))


def _find(unit: str, before: Callable[[], None]) -> Kernels:
    forced = instruction_sets.forced()
    why = "this installation contains no prebuilt kernels"
    try:
        if shipped := prebuilt.find():
            path, chosen = shipped
            flags = " ".join(toolchain.flags(chosen.flags, openmp=prebuilt.THREADED))
            best = f"{chosen.name} is the best instruction set that both this processor and the installation have"
            why = best if forced is None else _forces(forced.name)
            library = _open(path, unit)
            isa = instruction_sets.of(library)
            return Kernels(library, f"prebuilt for {chosen.name}", flags, str(path), why, isa=isa)
    except (Unavailable, OSError) as error:
        why = f"the prebuilt kernels cannot be used: {error}"
    if forced is not None:
        why += f"; {_forces(forced.name)}"
    try:
        with _lock(unit):
            return _compiled(unit, why, before=before)
    except Unavailable as error:
        raise Unavailable(f"{why}; {error}" if prebuilt.FOLDER.is_dir() else str(error)) from error


def _forces(name: str) -> str:
    return f"{instruction_sets.VARIABLE}={name} forces this instruction set"


def _begin(unit: str) -> None:
    """Compile ahead, in threads, what is needed after a unit that is compiled now; a failure is found by its call.

    First what begins a call of the families that modules expect, then what follows: the backward passes, the last
    family first, or without gradients the token steps.
    """
    family, _, part = unit.partition("/")
    if part == "backward":
        return
    families = [family, *(one for one in _expected if one != family)]
    following = "backward" if torch.is_grad_enabled() else "step"
    compile_ahead(*(ahead for one in families if (ahead := f"{one}/forward") != unit))
    compile_ahead(*(ahead for one in reversed(families) if (ahead := f"{one}/{following}") != unit), later=True)


def compile_ahead(*units: str, later: bool = False) -> None:
    """Compile units in threads, as many at a time as there are cores; ``later``: with lower priority."""
    for unit in units:
        if unit in UNITS and unit not in _found and unit not in _threads:
            thread = _threads[unit] = threading.Thread(target=_compile_ahead, args=(unit, later), daemon=True)
            thread.start()


def _compile_ahead(unit: str, later: bool) -> None:
    if later and sys.platform == "linux":  # where it is the priority of one thread, which its programs inherit
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    # RuntimeError: no thread starts while Python ends.
    with contextlib.suppress(Unavailable, OSError, RuntimeError), _ahead:
        if unit not in _found and not _closing.is_set():
            _find(unit, lambda: None)


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
    before = {unit: loaded(unit) for unit in interface.units(family)}
    _found.update(dict.fromkeys(before, library))
    try:
        yield
    finally:
        _found.update(before)


def _compiled(name: str, why: str, *options: str, before: Callable[[], None] = lambda: None) -> Kernels:
    compiler, problems = [*toolchain.find_compiler(), *options], dict[str, None]()
    for place in (cache_dirs.cache_folder, cache_dirs.temporary_folder):
        folder = None
        try:
            folder = place() / "native"
            found = store.provide(name, compiler, folder, partial(_forward_of, name), before)
            described = _described(name, *found, why)
        # An invalid LONGSPAN_CACHE.
        except ValueError as error:
            problems[str(error)] = None
        except OSError as error:
            problems[f"{error.filename or folder}: {error.strerror or error}"] = None
        else:
            if not problems:
                return described
            text = _unusable(problems, f"kernels are kept in {folder}")
            return replace(described, why=f"{why}; {text}", unusable=text)
    # A library for this process only. Its file is not needed once it is loaded, so that of a unit has its whole family.
    family, text = name.partition("/")[0], _unusable(problems, "every process compiles its kernels again")
    try:
        with _lock(family):
            if (own := None if options else _own.get(family)) is None:
                with tempfile.TemporaryDirectory(prefix="longspan-") as temporary:
                    found = store.provide(family, compiler, Path(temporary))
                    own = replace(_described(family, *found, f"{why}; {text}"), unusable=text)
                if not options:
                    _own[family] = own
            return own
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be stored or loaded: {error.strerror or error}") from error


_own: dict[str, Kernels] = {}  # by family: those that no folder keeps


def _unusable(problems: Mapping[str, None], instead: str) -> str:
    return f"the cache folder cannot be used ({'; '.join(problems)}): {instead}; set LONGSPAN_CACHE to another folder"


def _forward_of(name: str) -> dict[str, Path]:
    """The library that the trial of a backward pass needs besides."""
    family, _, part = name.partition("/")
    return {f"{family}/forward": Path(find(f"{family}/forward").path)} if part == "backward" else {}


def _described(name: str, path: Path, seal: store.Seal, why: str) -> Kernels:
    library = _open(trusted.library(path, seal.sha256), name)
    isa, forced = instruction_sets.of(library), instruction_sets.forced()
    # CXX can contain flags such as -mno-avx512f.
    if forced is not None and isa not in ("", forced.name):
        raise Unavailable(
            f"{instruction_sets.VARIABLE}={forced.name}, but the compiler generates code for {isa}; "
            f"remove -m flags from CXX, or pass {instruction_sets.VARIABLE}={isa}"
        )
    return Kernels(library, f"compiled here by {seal.compiler}", seal.flags, str(path), why, isa=isa)


def _open(path: str | Path, name: str) -> ctypes.CDLL:
    """Open a library and declare its functions; raises OSError for an invalid file or a missing function."""
    openmp.share()
    try:
        return interface.declare(ctypes.CDLL(str(path)), name)
    except AttributeError as error:
        raise OSError(str(error)) from error
