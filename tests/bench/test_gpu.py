"""The script for a machine with a GPU: every part runs in small on a CPU, and failures are reported."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longspan

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_part_runs_in_small_on_a_cpu(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": ""}
    command = [sys.executable, SCRIPT, "--device", "cpu", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["parts"] == dict.fromkeys(("machine", "laws", "tests", "bench", "decode"), "done")
    rows = {name: [row for row in found["rows"] if row["part"] == name] for name in found["parts"]}
    assert {row["what"] for row in rows["machine"]} == {"versions", "copy", "bfloat16 product"}
    assert {row["law"] for row in rows["laws"]} == {
        "equals_cpu",
        "causal",
        "parallel_is_recurrent",
        "state",
        "gradients",
        "float32",
        "bfloat16",
        "padding",
        "packed",
    }
    assert {row["status"] for row in rows["tests"]} <= {"passed", "skipped"}
    assert [row for row in rows["bench"] if row.get("ms", 0) <= 0] == []
    assert {row["candidate"] for row in rows["bench"]} >= {"sdpa causal", "linear_attention", "delta_rule"}
    assert {row["batch"] for row in rows["decode"] if row["step_ms"] > 0} == {1, 64}
    assert "sdpa causal" in done.stdout.partition("bench: ms")[2]
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == len(found["rows"])


@pytest.mark.slow
def test_all_mechanisms_keep_the_laws_on_a_cpu(gpu):
    rows = list(gpu.laws("cpu", False))
    assert [row for row in rows if row["status"] != "passed"] == []
    assert len({row["mechanism"] for row in rows}) == 12


def test_broken_laws_are_reported(gpu, monkeypatch):
    build = longspan.build

    def leaky(*arguments, **options):
        attention = build(*arguments, **options)
        forward = attention.forward

        def call(x, *more, **given):
            y, state = forward(x, *more, **given)
            return y + x.mean(1, keepdim=True), state

        attention.forward = call
        return attention

    monkeypatch.setattr(longspan, "build", leaky)
    status = {row["law"]: row["status"] for row in gpu._laws("linear", "cpu", 13)}
    broken = {law for law, one in status.items() if one == "failed"}
    assert broken == {"causal", "parallel_is_recurrent", "padding", "packed", "gradients"}


def test_nan_is_an_error(gpu, monkeypatch):
    build = longspan.build

    def blank(*arguments, **options):
        attention = build(*arguments, **options)
        forward = attention.forward
        attention.forward = lambda *given, **more: (forward(*given, **more)[0] * float("nan"), None)
        return attention

    monkeypatch.setattr(longspan, "build", blank)
    status = {row["law"]: row["status"] for row in gpu._laws("linear", "cpu", 13)}
    assert set(status.values()) == {"failed"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "--device cpu is only to try the script: add --quick"),
        (["--parts", "laws,none"], "unknown part 'none'; the parts are machine, laws, tests, bench, decode"),
        pytest.param(
            [],
            f"torch {torch.__version__} finds no CUDA GPU; --device cpu --quick tries the script without one",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_run_is_one_line_and_code_2(gpu, words, said, capsys):
    assert gpu.main(words) == 2
    assert capsys.readouterr().err == f"benchmarks/gpu.py: {said}\n"


def test_missing_packages_are_named(gpu, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "safetensors" else find(name))
    assert gpu.main(["--device", "cpu", "--quick"]) == 2
    said = capsys.readouterr().err
    assert said == "benchmarks/gpu.py: missing: safetensors (for import longspan); install them with pip\n"


@pytest.mark.slow
def test_what_is_needed_is_all_that_the_import_needs(gpu):
    """Without the optional packages `import longspan` works."""
    code = (
        "import sys\n"
        "for name in ('yaml', 'jsonargparse', 'filelock', 'tqdm', 'pytest', 'triton'): sys.modules[name] = None\n"
        "import longspan"
    )
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_pytest_the_tests_are_skipped(gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(gpu.tests("cpu", True)) == [{"status": "skipped", "note": "pytest is not installed"}]


def test_a_part_is_stopped_at_its_limit(gpu):
    code = "import time; time.sleep(60)"
    assert gpu._ended([sys.executable, "-c", code], dict(os.environ), 0.2) == "stopped at its limit of 0 s"
    assert gpu._ended([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), 20) == "ended with exit code 3"


def test_failures_and_parts_that_do_not_end_are_exit_code_1(gpu, monkeypatch, tmp_path, capsys):
    rows = [
        {"part": "laws", "mechanism": "gla", "law": "causal", "status": "failed", "error": 0.5, "tolerance": 1e-9},
        {
            "part": "bench",
            "candidate": "sdpa causal",
            "mode": "forward",
            "n": 64,
            "dim": 16,
            "error": "OutOfMemoryError: x",
        },
    ]

    def run(command, environment, limit):
        with (tmp_path / "gpu.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows) + '{"part": "la')
        return "done"

    monkeypatch.setattr(gpu, "_ended", run)
    assert gpu.drive(["laws"], "cpu", True, tmp_path) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == rows
    out = capsys.readouterr().out
    assert "FAILED gla, causal: error 5.0e-01, allowed 1e-09" in out
    assert "OutOfMemoryError" in out
    monkeypatch.setattr(gpu, "_ended", lambda *_: "stopped at its limit of 3 s")
    assert gpu.drive(["bench"], "cpu", True, tmp_path) == 1
    assert "bench: stopped at its limit of 3 s" in capsys.readouterr().out
