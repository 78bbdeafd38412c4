"""The kernels for aarch64: compiled without a warning by a cross compiler, and the same values on an emulator."""

import re
import shutil
from pathlib import Path

import pytest
import torch

import isa_cases
import replays
from longspan.ops.native import build
from longspan.ops.native.build import instruction_sets, toolchain

COMPILER, DUMP, EMULATOR = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump", "qemu-aarch64"
DRIVER = Path(__file__).parents[1] / "native" / "replay.cpp"
(NEON,) = instruction_sets.TABLE["aarch64"]
# Without code for vectors: it marks blocks.
SCALAR = "pattern/seen.cpp"
MISSING = [name for name in (COMPILER, DUMP) if shutil.which(name) is None]
# Relative to the largest value: float32 by the order of sums, bfloat16 by one unit in the last place.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Object files by source, compiled as in a wheel, and with warnings as errors."""
    folder = tmp_path_factory.mktemp("objects")
    found = {source: folder / f"{source.parent.name}-{source.stem}.o" for source in toolchain.SOURCES}
    flags = [*toolchain.flags(NEON.flags, openmp=True), "-Wall", "-Wextra", "-Werror"]
    toolchain.together([[COMPILER, *flags, "-c", str(source), "-o", str(file)] for source, file in found.items()])
    return found


def test_loops_are_of_neon(objects):
    """Fused multiply-adds of four floats."""
    for source, file in objects.items():
        count = len(re.findall(r"\tfmla\tv\d+\.4s", toolchain.run([DUMP, "-d", str(file)])))
        assert (count > 20) == (not source.match(SCALAR)), source


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"not installed: {EMULATOR}")
def test_values_are_those_of_this_processor(objects, tmp_path, monkeypatch, threads):
    threads(2)  # as on the emulator
    # The set whose vectors have as many lanes as those of NEON.
    monkeypatch.setenv("LONGSPAN_ISA", instruction_sets.known()[-1].name)
    recorder = replays.Recorder(monkeypatch)
    families = isa_cases.CALLS
    try:
        units = [unit for family in families for unit in build.interface.units(family)]
        libraries = {unit: recorder.of(build.find(unit).library) for unit in units}
    except build.Unavailable as error:
        pytest.skip(f"no native kernels here: {error}")
    monkeypatch.setattr(build, "_found", libraries)
    for family in families:
        for dtype in TOLERANCES:
            isa_cases.results(family, dtype, "native")
    calls = recorder.calls
    names = {name for family in families for name, (_, given) in build.interface.functions(family).items() if given}
    assert {call.name for call in calls} == names - {"longspan_buckets_seen"}

    (tmp_path / "calls.h").write_text(replays.header())
    given, written, program = (tmp_path / name for name in ("calls", "results", "replay"))
    given.write_bytes(b"".join(call.content for call in calls))
    # Without shared libraries of that system, which are not here.
    command = [COMPILER, "-std=c++17", "-O1", "-fopenmp", "-static", f"-I{tmp_path}", str(DRIVER)]
    toolchain.run([*command, *map(str, objects.values()), "-o", str(program)])
    assert toolchain.run([EMULATOR, str(program), str(given), str(written)]).split() == [NEON.name]

    for call, (result, found) in zip(calls, replays.results(calls, written.read_bytes()), strict=True):
        assert result == call.result, call.name
        for raw, dtype, one in zip(call.after, call.dtypes, found, strict=True):
            right = replays.tensor(raw, dtype)
            if dtype not in TOLERANCES:
                assert torch.equal(one, right), call.name
                continue
            # Memory that no call fills is NaN, and the logarithm of an empty sum is infinite.
            finite = right.isfinite()
            assert torch.equal(one[~finite].nan_to_num(), right[~finite].nan_to_num()), call.name
            one, right = one[finite].double(), right[finite].double()
            if one.numel():
                error = ((one - right).abs().max() / right.abs().max()).item()
                assert error <= TOLERANCES[dtype], (call.name, error)
