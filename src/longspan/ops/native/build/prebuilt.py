"""Kernels that came with the installation, compiled for a few instruction sets when its wheel was built."""

import contextlib
import hashlib
import platform
import sys
from pathlib import Path

from .toolchain import Unavailable

FOLDER = Path(__file__).parents[1] / "prebuilt"
THREADED = sys.platform == "linux"  # where torch brings a runtime that gcc's OpenMP can share
LIST = "SHA256SUMS"  # as the command sha256sum writes it
_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
# What a processor must have, in the words of /proc/cpuinfo; the best first, and the last asks for nothing.
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
    """The library for this processor, named after its instruction set; None in an installation without any.

    Raises Unavailable where there are some and the one for this processor is missing or damaged.
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
    raise Unavailable(f"{path} is not what was installed; install longspan again")


def level() -> str:
    """The best instruction set that this processor has among those that wheels are built for. Raises Unavailable."""
    found = features()
    for name, needed in LEVELS.get(platform.machine(), {}).items():
        if needed <= found:
            return name
    raise Unavailable(f"none are built for a processor of the kind {platform.machine()}")


def features() -> frozenset[str]:
    """What the processor and the system can do, as /proc/cpuinfo says; empty where it cannot be read."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()
