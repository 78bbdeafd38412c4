"""The laws on a device other than the CPU: on a GPU, and on a device of Python that refuses to mix with the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longspan
from longspan import testing
from longspan.testing import numeric
from longspan.testing.gauge import Subject, usable

ELSEWHERE = Path(__file__).with_name("elsewhere.py")
FIRST = [longspan.mechanism_examples(name)[0] for name in longspan.list_mechanisms()]
STACKS = {"universal(steps=3)": "gated_deltanet", "act(steps=4)": "softmax", "reversible": "softmax"}
# These compile or trace, or need minutes where each operation passes through Python.
ON_A_GPU_ALONE = ("compiles", "exports", "adversarial", "blocks", "content")


def elsewhere(laws, *specs, code=""):
    """(spec, law) -> (status, note) on the device ``elsewhere``, in another process: a device stays in its process."""
    command = [sys.executable, "-c", code, laws, *specs] if code else [sys.executable, str(ELSEWHERE), laws, *specs]
    paths = os.pathsep.join([str(ELSEWHERE.parent), *sys.path])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, done.stdout.splitlines())
    return {(row["spec"], row["law"]): (row["status"], row["note"]) for row in rows}


CASES = [(law, spec, "") for spec in FIRST for law in testing.applicable(spec)]
CASES += [(law, spec, stack) for stack, spec in STACKS.items() for law in testing.applicable(spec, stack=stack)]


@pytest.mark.cuda
@pytest.mark.parametrize(("law", "spec", "stack"), CASES)
def test_law_on_a_gpu(law, spec, stack):
    row = testing.check(law, spec, stack=stack, device="cuda")
    assert row.status in ("passed", "exempt"), row.note


def test_no_law_mixes_devices():
    found = elsewhere("causal,padding,packed", "linear")
    assert len(found) == 3
    assert {status for status, _ in found.values()} == {"passed"}, found


@pytest.mark.slow
@pytest.mark.parametrize("spec", FIRST)
def test_no_law_of_a_mechanism_mixes_devices(spec):
    laws = [law for law in testing.applicable(spec) if law not in ON_A_GPU_ALONE]
    found = elsewhere(",".join(laws), spec)
    assert len(found) == len(laws)
    assert {status for status, _ in found.values()} <= {"passed", "exempt"}, found


PLANTED = """
import sys, elsewhere
from longspan.testing.gauge import Subject

mask = Subject.mask
Subject.mask = lambda *given, **options: mask(*given, **options).cpu()
elsewhere.main(sys.argv[1], sys.argv[2:])
"""


def test_a_tensor_that_stays_on_the_cpu_breaks_a_law():
    ((status, note),) = elsewhere("mixed_rows", "linear", code=PLANTED).values()
    assert status == "failed"
    assert "operands on ['cpu', 'elsewhere:0']" in note, note


def test_weights_and_inputs_are_on_the_device(monkeypatch):
    monkeypatch.setattr("longspan.testing.gauge.usable", torch.device)
    subject = Subject("linear", device="meta")
    module = subject.make(dtype=torch.float32)
    assert {str(t.device) for t in [*module.parameters(), *module.buffers()]} == {"meta"}
    assert {str(t.device) for t in (subject.data(), subject.mask(2, 3, seed=1, kept=0.5))} == {"meta"}
    assert subject.named == "linear on meta"


def test_a_device_without_float64_is_refused(monkeypatch):
    def zeros(*size, **options):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype\nmore")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(
        ValueError, match=r"cannot hold the float64 numbers of the laws: Cannot convert a MPS Tensor"
    ) as e:
        usable("cpu")
    assert "more" not in str(e.value)


def test_triton_is_compared_on_a_gpu():
    assert "triton" in numeric.compared(torch.device("cuda", 0))
    assert "triton" not in numeric.compared(torch.device("cpu"))
    assert {"auto", "torch", "native", "flex"} <= set(numeric.compared(torch.device("cpu")))
