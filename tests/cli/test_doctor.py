"""The doctor reports the kernels or why they are missing, and clears the cache."""

import ctypes
import hashlib
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from longspan.cli import doctor
from longspan.cli.entry import main
from longspan.ops.native import build
from longspan.ops.native.build import instruction_sets, openmp


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    return tmp_path


def test_kernels_are_reported(cache, capsys, monkeypatch):
    library, origin, path = ctypes.CDLL(None), "compiled here by c++ 12", "/some/where.so"
    kernels = build.Kernels(library, origin, "-O3 -g", path, "none prebuilt", isa="avx2")
    owned = [one for one in instruction_sets.TABLE["x86_64"] if one.name in ("generic", "avx2", "avx512")]
    monkeypatch.setattr(instruction_sets, "owned", lambda: owned)
    monkeypatch.setattr(build, "find", lambda unit: kernels)
    monkeypatch.setattr(build, "compile_ahead", lambda *units: None)
    monkeypatch.setattr(openmp, "share", lambda: "/torch/libgomp.so")
    (cache / "mnist").mkdir()
    (cache / "mnist" / "images").write_bytes(bytes(1234))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 or len(str(cache)) > 40
    rows = {line[:16].strip(): line[16:] for line in lines if line[:16].strip()}
    assert rows["native kernels"] == "compiled here by c++ 12"
    assert rows["instructions"] == "avx2 (this processor has generic, avx2, avx512)"
    assert rows["flags"] == "-O3 -g"
    assert {rows[family] for family in build.FAMILIES} == {"/some/where.so"}
    assert "none prebuilt" in rows.values()
    assert rows["OpenMP"] == "/torch/libgomp.so"
    assert rows["compiled"] == "nothing"
    assert f"{cache} (mnist: 1,234 bytes)" in " ".join(" ".join(lines).split())
    assert "lightning" in rows["extras"]


def test_compilations_are_reported(cache, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (cache / "native").mkdir()
    library, good, bad = (cache / "native" / name for name in ("0a.so", "0.json", "1.json"))
    library.write_bytes(b"code")
    digest = hashlib.sha256(b"code").hexdigest()
    seal = {"compiler": "c++ 12", "flags": "-O3", "library": "0a.so", "sha256": digest, "family": "linear"}
    good.write_text(json.dumps(seal))
    bad.write_text(json.dumps({"compiler": "c++ 13", "failed": "it does not end", "family": "gated"}))
    for path in (library, good, bad):
        path.chmod(0o600)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  compiled      gated, c++ 13: it does not end")
    assert lines[at + 1] == "                linear, c++ 12: 0a.so"


def test_the_reason_for_missing_kernels_is_reported(cache, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 0
    assert "CXX='no-such-compiler'" in capsys.readouterr().out


@pytest.mark.parametrize("ratio", [0.25, 6.0])
def test_slow_bfloat16_is_reported(ratio, cache, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "bfloat16_ratio", lambda: ratio)
    # Nothing is compiled for this.
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split()).partition(" bfloat16 ")[2].partition(" native ")[0]
    assert f"{ratio:.2g}" in text
    assert ("better choice" in text) is (ratio > 1)


def test_products_of_both_precisions_are_timed(monkeypatch):
    """The shortest of each counts: the first one sets up what the others find."""
    now, taken = [0.0], {torch.bfloat16: [50.0, 8.0, 9.0], torch.float32: [70.0, 3.0, 2.0]}

    def product(x, weight):
        now[0] += taken[x.dtype].pop(0)

    monkeypatch.setattr(F, "linear", product)
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert doctor.bfloat16_ratio() == 4.0


def test_clears_the_kernels_and_nothing_else(cache, capsys):
    for name in ("native", "mnist"):
        (cache / name).mkdir()
        (cache / name / "file").write_bytes(bytes(7))
    assert main(["doctor", "--clear"]) == 0
    assert [path.name for path in cache.iterdir()] == ["mnist"]
    assert "7 bytes" in capsys.readouterr().out
    assert main(["doctor", "--clear"]) == 0
