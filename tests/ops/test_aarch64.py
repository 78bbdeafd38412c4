"""The kernels for aarch64: compiled without a warning by a cross compiler, and the same values on an emulator."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import isa_cases
import replays
from longspan.ops.native import build
from longspan.ops.native.build import instruction_sets, toolchain

COMPILER, DUMP, EMULATOR = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump", "qemu-aarch64"
DRIVER = Path(__file__).parents[1] / "native" / "replay.cpp"
DOTPROD, NEON = instruction_sets.TABLE["aarch64"]
# Without code for vectors: it marks blocks.
SCALAR = "pattern/seen.cpp"
# Units whose calls no case of isa_cases.py makes; they are compiled, not run.
UNCALLED = ("pattern/seen", "pattern/chosen", "pattern/picked", "pattern/stick", "quantized/entropy")
MISSING = [name for name in (COMPILER, DUMP) if shutil.which(name) is None]
# Relative to the largest value: float32 by the order of sums, bfloat16 by one unit in the last place.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}

needs_emulator = pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"not installed: {EMULATOR}")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


def compiled(folder, isa, sources):
    """Object files by source, compiled as in a wheel, and with warnings as errors."""
    found = {source: folder / f"{isa.name}-{source.parent.name}-{source.stem}.o" for source in sources}
    flags = [*toolchain.flags(isa.flags, openmp=True), "-Wall", "-Wextra", "-Werror"]
    toolchain.together([[COMPILER, *flags, "-c", str(source), "-o", str(file)] for source, file in found.items()])
    return found


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Object files by source."""
    return compiled(tmp_path_factory.mktemp("objects"), NEON, toolchain.SOURCES)


def test_loops_are_of_neon(objects):
    """Fused multiply-adds of four floats."""
    for source, file in objects.items():
        # Of the output of toolchain.run only the beginning and the end are kept.
        code = subprocess.run([DUMP, "-d", str(file)], check=True, capture_output=True, text=True).stdout
        count = len(re.findall(r"\tfmla\tv\d+\.4s", code))
        assert (count > 20) == (not source.match(SCALAR)), source


def recorded(monkeypatch, isa, families):
    """The calls of the cases of some families on this processor."""
    monkeypatch.setenv("LONGSPAN_ISA", isa)
    monkeypatch.setattr(build, "_found", {})
    recorder = replays.Recorder(monkeypatch)
    try:
        units = [unit for family in families for unit in build.interface.units(family)]
        libraries = {unit: recorder.of(build.find(unit).library) for unit in units}
    except build.Unavailable as error:
        pytest.skip(f"no native kernels here: {error}")
    monkeypatch.setattr(build, "_found", libraries)
    for family in families:
        for dtype in TOLERANCES:
            isa_cases.results(family, dtype, "native")
    return recorder.calls


def replayed(calls, objects, isa, folder):
    """What the calls return and write on the emulator."""
    (folder / "calls.h").write_text(replays.header({call.name for call in calls}))
    given, written, program = (folder / name for name in ("calls", "results", "replay"))
    given.write_bytes(b"".join(call.content for call in calls))
    # Without shared libraries of that system, which are not here.
    command = [COMPILER, "-std=c++17", "-O1", "-fopenmp", "-static", f"-I{folder}", str(DRIVER)]
    toolchain.run([*command, *map(str, objects.values()), "-o", str(program)])
    assert isa.name in toolchain.run([EMULATOR, str(program), str(given), str(written)]).split()
    return replays.results(calls, written.read_bytes())


@needs_emulator
def test_values_are_those_of_this_processor(objects, tmp_path, monkeypatch, threads):
    threads(2)  # as on the emulator
    families = isa_cases.CALLS
    # The set whose vectors have as many lanes as those of NEON.
    calls = recorded(monkeypatch, instruction_sets.known()[-1].name, families)
    names = {name for family in families for name, (_, given) in build.interface.functions(family).items() if given}
    assert {call.name for call in calls} == names - {
        name for unit in UNCALLED for name in build.interface.functions(unit)
    }
    for call, (result, found) in zip(calls, replayed(calls, objects, NEON, tmp_path), strict=True):
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
                # Where all are 0, so must be the others.
                error = ((one - right).abs().max() / right.abs().max().clamp(min=1e-30)).item()
                assert error <= TOLERANCES[dtype], (call.name, error)


@needs_emulator
@pytest.mark.parametrize("isa", [NEON, DOTPROD], ids=lambda isa: isa.name)
def test_products_with_quantized_weights_have_the_same_bits(isa, tmp_path, monkeypatch, threads):
    """As with fused multiply-adds here: sums of integers are exact, and those of cells are in the same order."""
    if all(one.name != "avx2" for one in instruction_sets.usable()):
        pytest.skip("this processor has no AVX2")
    threads(2)
    objects = compiled(tmp_path, isa, [source for source in toolchain.SOURCES if source.match("quantized/*.cpp")])
    calls = recorded(monkeypatch, "avx2", ["quantized"])
    for call, (result, found) in zip(calls, replayed(calls, objects, isa, tmp_path), strict=True):
        assert result == call.result
        for raw, dtype, one in zip(call.after, call.dtypes, found, strict=True):
            assert torch.equal(one, replays.tensor(raw, dtype)), call.name
