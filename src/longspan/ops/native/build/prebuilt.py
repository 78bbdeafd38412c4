"""Kernels in the installed wheel, compiled for a few instruction sets."""

import contextlib
import hashlib
import platform
import sys
from pathlib import Path

from .toolchain import Unavailable

FOLDER = Path(__file__).parents[1] / "prebuilt"
THREADED = sys.platform == "linux"  # torch has a runtime there that gcc's OpenMP can share
LIST = "SHA256SUMS"  # in the format of sha256sum
_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
# Required processor flags, as in /proc/cpuinfo; the best first, and the last requires none.
LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {
        "x86-64-v4": _V3 | set("avx512f avx512bw avx512cd avx512dq avx512vl".split()),
        "x86-64-v3": _V3,
        "x86-64": frozenset(),
    },
    "aarch64": {"armv8-a": frozenset()},
    "arm64": {"armv8-a": frozenset()},
}


def find() -> Path | None:
    """Return the library for this processor, named after its instruction set; None without prebuilt kernels.

    Raises Unavailable if the library for this processor is missing or damaged.
    """
    if not FOLDER.is_dir():
        return None
    path = FOLDER / f"{level()}.so"
    try:
        lines = (FOLDER / LIST).read_text(encoding="utf-8").splitlines()
        listed = {name: digest for digest, name in map(str.split, lines)}
        if listed.get(path.name) == hashlib.sha256(path.read_bytes()).hexdigest():
            return path
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    raise Unavailable(f"{path} does not match its checksum; reinstall longspan")


def level() -> str:
    """Return the best instruction set of this processor for which wheels are built. Raises Unavailable."""
    found = features()
    for name, needed in LEVELS.get(platform.machine(), {}).items():
        if needed <= found:
            return name
    raise Unavailable(f"there are no prebuilt kernels for {platform.machine()} processors")


def features() -> frozenset[str]:
    """Return the processor flags in /proc/cpuinfo; empty if it cannot be read."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()
