"""The first calls of newly compiled kernels, in a process of their own: a crash there is nobody's crash."""

import os
import sys
from pathlib import Path

from . import toolchain

# As selftest prints them, which only the child process imports.
PASSED, WRONG = "these kernels compute what they should", "these kernels are wrong: "
# Adds the trial of the decode kernels, which needs whole models; the child process imports it.
DECODE = "longspan.generation.native_trial"


class Failed(toolchain.Unavailable):
    """The kernels were compiled and do not work."""


def run(library: Path, family: str) -> None:
    """Try the library of a family in a child process.

    Raises Failed where the kernels crash, hang or compute something else, Unavailable where they cannot be tried.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    code = f"import sys, {DECODE}; from {__package__} import selftest; selftest.main(*sys.argv[1:])"
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, str(library), family]
    try:
        said = toolchain.run(command, os.environ | {"PYTHONPATH": path})
    except (toolchain.Crashed, toolchain.Hangs) as error:
        raise Failed(f"the compiled kernels failed their trial: {error}") from error
    except toolchain.Unavailable as error:
        raise toolchain.Unavailable(f"the compiled kernels cannot be tried: {error}") from error
    if WRONG in said:
        raise Failed(f"the compiled kernels failed their trial: {said.partition(WRONG)[2].strip()}")
    if PASSED not in said:
        raise toolchain.Unavailable(f"the compiled kernels cannot be tried: {sys.executable} is no Python")
