"""``longspan bench profile``: shares follow from clocks and times, and kernels with clocks compute the same values."""

import mmap
import re

import pytest
import torch

from longspan.cli.entry import WRONG, main
from longspan.ops.native import build
from longspan.ops.native.build import toolchain
from longspan.ops.native.call import available
from longspan_lab._utils import palette
from longspan_lab.bench import candidates, case, gated, limits, profile
from support.bench import in_quiet, run_into_o

HEADER = toolchain.FOLDER / "shared" / "stages.h"
SMALL = ["--lengths", "40,9", "--heads", "2", "--size", "8", "--batches", "1,3", "--rounds", "1"]


@pytest.fixture
def kernels():
    if not available(*build.STAGED):
        pytest.skip("the native kernels are measured")


@pytest.fixture
def clocks(kernels):
    def of(family):
        try:
            return build.staged(family)
        except build.Unavailable as error:
            pytest.skip(str(error))

    return of


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    in_quiet(tmp_path, monkeypatch)
    monkeypatch.setattr(limits, "gemms", lambda dtype: {"gemm 8": case.bound(limits.gemm(8, dtype))})
    monkeypatch.setattr(profile, "SPENT", 0.0)
    return tmp_path


def ran(capsys, *words, code=0):
    return run_into_o(capsys, "profile", *words, *SMALL, code=code)


def test_useful_operations():
    assert profile.operations("linear", "forward", 64, 10) == 4 * 64 * 64 * 10
    assert profile.operations("channel decay", "forward+backward", 8, 3) == 14 * 64 * 3
    assert profile.operations("delta", "forward", 8, 3) == 6 * 64 * 3
    assert profile.operations("gated delta", "forward+backward", 8, 3) == 20 * 64 * 3
    assert profile.operations("general delta", "forward+backward", 8, 3) == 28 * 64 * 3


@pytest.mark.parametrize("kernel", [name for name, of in profile.KERNELS.items() if of.bound == profile.COPY])
def test_traffic(kernel):
    given = profile.operands(kernel, 1, 5, 2, 8)
    tokens = [t for t in given.values() if t is not None and t.dim() == 3]
    inputs, output = sum(t.numel() for t in tokens), profile._upstream(given).numel()
    forward = inputs + output
    assert profile.traffic(kernel, "forward", 16, 5) == forward
    assert profile.traffic(kernel, "forward+backward", 16, 5) == forward + (inputs + output) + inputs


@pytest.mark.parametrize("kernel", profile.KERNELS)
def test_kernels_agree_with_the_definition(kernel, kernels):
    assert profile.check(kernel, 40, profile.Options(heads=2, size=8), backward=True) < 1e-5


def test_shares_of_clocks():
    # Three threads of 100 ticks, the last of which never ran.
    rest = [0] * (len(profile.STAGES) - 3)
    found = profile.shares([[20, 10, 70, *rest], [60, 0, 40, *rest], [100, 0, 0, *rest]], 2)
    assert found["waiting"] == pytest.approx(1 - 120 / 200)
    assert found["stage states"] == pytest.approx(10 / 120)
    assert found["stage reading"] == pytest.approx(110 / 120)
    assert sum(share for name, share in found.items() if name != "waiting") == pytest.approx(1)
    assert profile.shares([[100, 0, 0, *rest]], 2) == {}


def test_page_faults_are_counted():
    blocks = []
    calls, size = 5, 64 * mmap.PAGESIZE

    def touch():
        blocks.append(mmap.mmap(-1, size))
        blocks[-1].write(bytes(size))

    assert profile.paging(touch, calls)["faults"] >= 64
    assert profile.paging(lambda: None, calls)["faults"] < 64


def test_stages_are_those_of_the_kernels():
    enum = re.search(r"enum Stage \{(.*?)\};", HEADER.read_text(encoding="utf-8"), re.DOTALL)
    assert enum is not None
    names = re.findall(r"^ +(\w+),", enum[1], re.MULTILINE)
    assert tuple(name.replace("_", " ") for name in names) == profile.STAGES
    assert {*palette.STAGES} == {*profile.STAGES}


PRODUCTS = {"scoring", "from state", "within chunk", "solving", "updating"}
UNUSED = {
    "linear": {"solving", "scanning", "convolving", "summing"},
    "gated delta": {"scanning", "convolving", "summing"},
    "general delta": {"scanning", "convolving", "summing"},
    "diagonal scan": {*PRODUCTS, "mapping", "convolving", "summing"},
    "selective scan": {*PRODUCTS, "convolving"},
    "convolution": {*PRODUCTS, "scanning"},
}


# Compiling a family takes many seconds.
@pytest.mark.parametrize(
    "kernel", [pytest.param(name, marks=[pytest.mark.slow] * (name != "linear")) for name in UNUSED]
)
def test_kernels_with_clocks(kernel, clocks):
    family = profile.KERNELS[kernel].family
    library = clocks(family)
    assert library.longspan_stage_count() == len(profile.STAGES)
    given = profile.operands(kernel, 1, 600, 2, 8)
    upstream = profile._upstream(given)

    def outcome():
        return gated.outcome(lambda t: profile.ours(kernel, "native", t), given, upstream, backward=True)

    units, expected = build.interface.units(family), outcome()
    before = [build.loaded(unit) for unit in units]
    with build.using(family, library):
        assert all(build.loaded(unit) is library for unit in units)
        profile.ticks(library)
        found = outcome()
        spent = profile.ticks(library)
    assert [build.loaded(unit) for unit in units] == before
    torch.testing.assert_close(found, expected)
    assert len(spent) == build.CLOCKS
    assert len({sum(thread) for thread in spent}) == 1
    total = dict(zip(profile.STAGES, map(sum, zip(*spent, strict=True)), strict=True))
    assert {name for name, ticks in total.items() if not ticks} == UNUSED[kernel]
    assert sum(total.values()) - total["waiting"] < torch.get_num_threads() * sum(spent[0])


def test_other_families_have_no_clocks():
    with pytest.raises(ValueError, match="'pattern' do not measure stages; those of .*linear.* do"):
        build.staged("pattern")


@pytest.mark.parametrize("kernel", profile.STEPS)
def test_token_steps_agree_with_the_definition(kernel, kernels):
    assert profile._check_step(kernel, 3, profile.Options(heads=2, size=8)) < 1e-5


def test_a_wrong_step_is_refused(monkeypatch, kernels):
    alone = profile.Token.alone
    monkeypatch.setattr(profile.Token, "alone", lambda token: lambda: (1.01 * alone(token)()[0], token.state))
    with pytest.raises(candidates.Refused, match="its output is off the float64 definition by 0.01 at one token"):
        profile._check_step("decay", 1, profile.Options(heads=2, size=8))


def test_in_whole(capsys, clocks):
    clocks("linear")
    out, result = ran(capsys, "linear")
    sequences = {(r["kernel"], r["mode"], r["length"]): r for r in result["rows"] if r["what"] == "sequence"}
    modes = ("forward", "forward+backward")
    assert set(sequences) == {("linear", m, n) for m in modes for n in (9, 40)}
    for (kernel, mode, length), row in sequences.items():
        rate = profile.operations(kernel, mode, 8, 2 * length) / row["seconds"] / 1e9
        assert row["gflops"] == pytest.approx(rate)
        assert row["share"] == pytest.approx(rate / result["gemm_gflops"])
        assert row["bound"] == "GEMM"
        assert row["error"] < 1e-5
        assert row["faults"] >= 0
        assert 0 <= row["waiting"] < 1
        assert sum(value for name, value in row.items() if name.startswith("stage ")) == pytest.approx(1)
    steps = {(r["kernel"], r["batch"]): r for r in result["rows"] if r["what"] == "step"}
    assert set(steps) == {("linear", 1), ("linear", 3)}
    for row in steps.values():
        assert row["to_bound"] == pytest.approx(row["seconds"] / row["bound_seconds"])
        assert row["kernel_to_bound"] == pytest.approx(row["kernel_seconds"] / row["bound_seconds"])
        assert row["to_empty"] == pytest.approx(row["seconds"] / row["empty_seconds"])
    assert result["machine"]["instruction set"] == build.find("linear").isa
    assert "forward: time (share of GEMM)" in out
    assert "within chunk" in out
    assert "kernel to bound" in out


@pytest.mark.parametrize(
    "kernels", [("convolution",), pytest.param(("diagonal scan", "selective scan"), marks=pytest.mark.slow)]
)
def test_scans_and_the_convolution_are_compared_with_a_copy(kernels, capsys, clocks):
    for kernel in kernels:
        clocks(profile.KERNELS[kernel].family)
    out, result = ran(capsys, *kernels)
    modes = ("forward", "forward+backward")
    sequences = {(r["kernel"], r["mode"], r["length"]): r for r in result["rows"]}
    assert set(sequences) == {(k, m, n) for k in kernels for m in modes for n in (9, 40)}
    for (kernel, mode, length), row in sequences.items():
        assert row["bound"] == "copy"
        assert row["bytes"] == 4 * profile.traffic(kernel, mode, 16, length)
        assert row["share"] == pytest.approx(row["bound_seconds"] / row["seconds"])
        assert row["error"] < 1e-5
        assert "gflops" not in row
        assert sum(value for name, value in row.items() if name.startswith("stage ")) == pytest.approx(1)
    assert "forward: time (share of copy)" in out
    assert ("convolving" if "convolution" in kernels else "scanning") in out
    assert "GEMM peak" not in out


def test_heads_of_any_size_without_steps(kernels, monkeypatch):
    monkeypatch.setattr(profile, "staged", lambda families: ({}, "left out"))
    options = profile.Options(kernels=("convolution",), lengths=(3,), heads=1, size=2000, rounds=1, backward=False)
    *_, result = profile.run(options, lambda items, count, label: items)
    assert [row["kernel"] for row in result["rows"]] == ["convolution"]


def test_without_a_compiler(capsys, monkeypatch, kernels):
    def fails(family):
        raise build.Unavailable("no C++ compiler was found")

    monkeypatch.setattr(build, "staged", fails)
    out, result = ran(capsys, "decay", "--no-backward")
    assert "Skipped: stages: no C++ compiler was found" in out
    assert {row["mode"] for row in result["rows"] if row["what"] == "sequence"} == {"forward"}
    assert all("share" in row and "waiting" not in row for row in result["rows"] if row["what"] == "sequence")


def test_a_wrong_kernel_gets_no_figure(capsys, monkeypatch, kernels):
    ours = profile.ours
    monkeypatch.setattr(
        profile, "ours", lambda k, name, given: ours(k, name, given) * (1.01 if name == "native" else 1)
    )
    monkeypatch.setattr(profile, "staged", lambda families: ({}, "left out"))
    out, result = ran(capsys, "delta", "--no-backward", code=1)
    assert {row["what"] for row in result["rows"]} == {"step"}
    assert "Refused: delta, forward, N 9: its output is off the float64 definition by 0.01" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decays"], "unknown kernel 'decays'"),
        (["--size", "2000"], "--size=2000: token steps serve less than 1024 channels; pass --batches 0"),
    ],
)
def test_mistakes(words, message, capsys, kernels):
    assert main(["bench", "profile", *words]) == WRONG
    assert message in capsys.readouterr().err
