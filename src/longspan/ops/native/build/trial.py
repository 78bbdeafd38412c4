"""The first calls of newly compiled kernels, in a child process, which may crash."""

import os
import sys
from pathlib import Path

from . import toolchain

# Printed by selftest, which only the child process imports.
PASSED, WRONG = "these kernels are correct", "these kernels are wrong: "
# Adds the trial of the decode kernels, which needs whole models; the child process imports it.
DECODE = "longspan.generation.native_trial"


class Failed(toolchain.Unavailable):
    """The kernels were compiled but do not work."""


def run(library: Path, family: str) -> None:
    """Test the library of a family in a child process.

    Raises:
        Failed: the kernels crash, hang or compute wrong values.
        Unavailable: the child process does not work.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    code = f"import sys, {DECODE}; from {__package__} import selftest; selftest.main(*sys.argv[1:])"
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, str(library), family]
    try:
        printed = toolchain.run(command, os.environ | {"PYTHONPATH": path})
    except (toolchain.Crashed, toolchain.Hangs) as error:
        raise Failed(f"the compiled kernels failed their trial: {error}") from error
    except toolchain.Unavailable as error:
        raise toolchain.Unavailable(f"the compiled kernels cannot be tested: {error}") from error
    if WRONG in printed:
        raise Failed(f"the compiled kernels failed their trial: {printed.partition(WRONG)[2].strip()}")
    if PASSED not in printed:
        raise toolchain.Unavailable(
            f"the compiled kernels cannot be tested: {sys.executable} is not a Python interpreter"
        )
