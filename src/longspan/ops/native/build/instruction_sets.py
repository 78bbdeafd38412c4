"""The instruction sets for which kernels are compiled, those of this processor, and the choice of one.

It imports nothing of longspan but the toolchain, so that the build of a wheel can use it.
"""

import contextlib
import ctypes
import functools
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import toolchain
from .toolchain import Unavailable

VARIABLE = "LONGSPAN_ISA"  # the environment variable that forces one
NATIVE = "native"  # its default: the best of this processor
REPORT = "isa.h"  # the header that names every macro without code that depends on it


@dataclass(frozen=True)
class InstructionSet:
    """One row of the table."""

    name: str
    """as in LONGSPAN_ISA, the file names of prebuilt libraries, and the report of a library (shared/isa.h)"""
    flags: str
    """flags of the compiler, separated by spaces"""
    needs: frozenset[str] = frozenset()
    """required processor flags, as in /proc/cpuinfo"""
    macro: str = ""
    """a macro of the compiler: kernels for this set are only built if a source has code under it"""


_AVX2 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
_AVX512 = _AVX2 | set("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | set("amx_tile amx_bf16".split())
_X86 = (
    InstructionSet(
        "amx_bf16", "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16", _AMX, "__AMX_BF16__"
    ),
    InstructionSet("avx512_bf16", "-march=x86-64-v4 -mavx512vnni -mavx512bf16", _BF16, "__AVX512BF16__"),
    InstructionSet("avx512_vnni", "-march=x86-64-v4 -mavx512vnni", _VNNI, "__AVX512VNNI__"),
    InstructionSet("avx512", "-march=x86-64-v4", _AVX512),
    InstructionSet("avx2", "-march=x86-64-v3", _AVX2),
    InstructionSet("generic", "-march=x86-64"),
)
_ARM = (
    InstructionSet("neon_dotprod", "-march=armv8.2-a+dotprod", frozenset({"asimddp"}), "__ARM_FEATURE_DOTPROD"),
    InstructionSet("neon", "-march=armv8-a"),
)
# By platform.machine(), the best first; the last one runs on every such processor.
TABLE: dict[str, tuple[InstructionSet, ...]] = {"x86_64": _X86, "aarch64": _ARM, "arm64": _ARM}
# sysctl's names of what /proc/cpuinfo calls otherwise.
_MACOS_NAMES = {"avx1.0": "avx", "lzcnt": "abm"}
_MACOS_KEYS = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")


def known() -> tuple[InstructionSet, ...]:
    """Return the sets of this kind of processor, the best first. Raises Unavailable if there are none."""
    if found := TABLE.get(platform.machine()):
        return found
    raise Unavailable(f"no instruction sets of {platform.machine()} processors are known")


def built() -> tuple[InstructionSet, ...]:
    """Return the sets of ``known`` for which the sources have code."""
    return tuple(one for one in known() if _has_code(one))


def owned() -> tuple[InstructionSet, ...]:
    """Return the sets of ``known`` that this processor has, with code in the sources or without."""
    found = features()
    return tuple(one for one in known() if one.needs <= found)


def usable() -> tuple[InstructionSet, ...]:
    """Return the sets that this processor has and the sources have code for."""
    there = owned()
    return tuple(one for one in built() if one in there)


def forced() -> InstructionSet | None:
    """Return the set that the environment variable LONGSPAN_ISA names; None if it is unset or ``native``.

    Raises Unavailable if no kernels are compiled for it, or if this processor lacks it.
    """
    name = os.environ.get(VARIABLE, "")
    if name in ("", NATIVE):
        return None
    chosen = next((one for one in built() if one.name == name), None)
    if chosen is None:
        there = any(one.name == name for one in known())
        why = "no kernel has code for it" if there else f"{platform.machine()} processors do not have it"
        raise Unavailable(f"{VARIABLE}={name!r}: {why}; pass {_listed(built())}")
    if lacking := chosen.needs - features():
        flags = ", ".join(sorted(lacking))
        raise Unavailable(f"{VARIABLE}={name!r} needs a processor with {flags}; pass {_listed(usable())}")
    return chosen


def _listed(sets: tuple[InstructionSet, ...]) -> str:
    names = [NATIVE, *(one.name for one in sets)]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def target() -> str:
    """Return the flags for compilation here: of the forced set, else of this machine. Raises as ``forced`` does."""
    chosen = forced()
    return toolchain.THIS_MACHINE if chosen is None else chosen.flags


def of(library: ctypes.CDLL) -> str:
    """Return the name of the best set whose code a library contains, as the library reports; "" without a report."""
    try:
        report = library.longspan_isa
    except AttributeError:
        return ""
    report.restype, report.argtypes = ctypes.c_char_p, ()
    reported = report().decode().split()
    return next((one.name for one in TABLE.get(platform.machine(), ()) if one.name in reported and _has_code(one)), "")


def _has_code(one: InstructionSet) -> bool:
    return not one.macro or one.macro in _code((*toolchain.SOURCES, *toolchain.HEADERS))


@functools.cache
def _code(files: tuple[Path, ...]) -> str:
    """The text of these files, without the header that lists the macros."""
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.name != REPORT)


def features() -> frozenset[str]:
    """Return the processor flags, named as in /proc/cpuinfo; empty if they cannot be read."""
    if sys.platform == "darwin":
        return _macos_features()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(("flags", "Features")):  # x86, arm64
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def _macos_features() -> frozenset[str]:
    if platform.machine() == "arm64":
        return frozenset({"asimddp"})  # all of them have it
    names: list[str] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["/usr/sbin/sysctl", "-n", *_MACOS_KEYS]
        names = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.lower().split()
    return frozenset(_MACOS_NAMES.get(name, name) for name in names)
