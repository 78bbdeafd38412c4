"""Every family of kernels is correct under every instruction set that this processor has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.ops.native import build
from longspan.ops.native.build import instruction_sets

TESTS = Path(__file__).parents[1]
# Relative to the largest value. Results in bfloat16 are sums in float32, rounded once, which is off by 2^-8 at most.
TOLERANCES = {"float32": 2e-6, "bfloat16": 1.25 * 2**-8}
try:
    build.find("convolution/forward")
    SETS = [one.name for one in instruction_sets.usable()]
    REASON = ""
except build.Unavailable as error:
    SETS, REASON = [], str(error)
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no native kernels here: {REASON}")


def check(name, *families):
    """Run families in a new process under an instruction set."""
    environment = os.environ | {"LONGSPAN_ISA": name, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-P", "-W", "error", str(TESTS / "isa_cases.py"), *families]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {family: found.pop("isa") for family, found in report.items()} == dict.fromkeys(families, name)
    for found in report.values():
        for dtype, tolerance in TOLERANCES.items():
            assert found[dtype]["errors"]
            wrong = {part: error for part, error in found[dtype]["errors"].items() if not error <= tolerance}
            assert not wrong, dtype
            assert not found[dtype]["changed"], f"the number of threads changes them in {dtype}"


def sets(number, family):
    """All sets but the first, under which all other tests run: of the two lowest one in turn, and all of those for
    which a family has code of its own.
    """
    lower = SETS[1:]
    usual = {"quantized": lower, "scan": lower[-2:]}.get(family, lower[number % 2 - 2 :][:1] or lower)
    for name in lower:
        yield pytest.param(name, family, marks=[pytest.mark.slow] * (name not in usual))


@pytest.mark.full
@pytest.mark.parametrize(("name", "family"), [one for given in enumerate(build.FAMILIES) for one in sets(*given)])
def test_a_family_under_a_lower_set(name, family):
    check(name, family)
