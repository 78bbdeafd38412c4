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


@pytest.mark.skipif(len(SETS) < 2, reason="this processor has one instruction set")
def test_a_lower_one():
    check(SETS[1], "convolution")


@pytest.mark.full
# All other tests run under the first one.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == SETS[0])) for name in SETS])
def test_all_families(name):
    check(name, *build.FAMILIES)
