"""Kernels in the installed wheel, compiled for a few instruction sets."""

import hashlib
import sys
from pathlib import Path

from . import instruction_sets
from .instruction_sets import InstructionSet
from .toolchain import Unavailable

FOLDER = Path(__file__).parents[1] / "prebuilt"
THREADED = sys.platform == "linux"  # torch has a runtime there that gcc's OpenMP can share
LIST = "SHA256SUMS"  # in the format of sha256sum


def find() -> tuple[Path, InstructionSet] | None:
    """Return the library for this processor and its instruction set; None without prebuilt kernels.

    Raises Unavailable if the library for this processor is missing or damaged, or if LONGSPAN_ISA cannot be followed.
    """
    if not FOLDER.is_dir():
        return None
    chosen = best()
    path = FOLDER / f"{chosen.name}.so"
    try:
        lines = (FOLDER / LIST).read_text(encoding="utf-8").splitlines()
        listed = {name: digest for digest, name in map(str.split, lines)}
        if listed.get(path.name) == hashlib.sha256(path.read_bytes()).hexdigest():
            return path, chosen
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    raise Unavailable(f"{path} does not match its checksum; reinstall longspan")


def best() -> InstructionSet:
    """Return the set that LONGSPAN_ISA forces, else the best of this processor for which wheels are built.

    Raises Unavailable.
    """
    return instruction_sets.forced() or instruction_sets.usable()[0]
