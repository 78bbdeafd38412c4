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
from longspan import testing
from longspan.ops.backends import forced_backend
from longspan_lab.tools import performance

PARTS = ("machine", "kernels", "bench", "decode", "laws", "training", "tests", "images")
SCRIPT = Path(__file__).parents[2] / "lab" / "gpu.py"


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
    assert found["parts"] == dict.fromkeys(PARTS, "done")
    assert (found["benchmark"], found["card"]) == ("gpu", "cpu")
    rows = {name: [row for row in found["rows"] if row["part"] == name] for name in found["parts"]}
    assert {row["what"] for row in rows["machine"]} == {"versions", "copy", "bfloat16 product"}
    assert {row["status"] for row in rows["kernels"]} <= {"passed", "not served"}
    assert len({row["kernel"] for row in rows["kernels"]}) == 14
    assert {(row["law"], row["status"]) for row in rows["laws"]} == {("causal", "passed"), ("padding", "passed")}
    assert {row["status"] for row in rows["tests"]} <= {"passed", "skipped"}
    assert [row for row in rows["bench"] if row.get("ms", 1) <= 0] == []
    measured = {row["candidate"] for row in rows["bench"] if "ms" in row}
    assert measured >= {"sdpa causal", "linear_attention, torch", "delta_rule, torch", "sparse window 17"}
    assert {row["batch"] for row in rows["decode"] if row.get("step_ms", 0) > 0} == {1, 64}
    assert {row["how"] for row in rows["decode"] if row.get("token_ms", 0) > 0} >= {"eager"}
    start, end = rows["training"]
    assert end["bits"] < start["bits"]
    assert end["tokens_per_s"] > 0
    eager = [row for row in rows["images"] if row["how"] == "eager"]
    assert {(row["mechanism"], row["batch"]) for row in eager if row["images_per_s"] > 0} == {
        (spec, batch) for spec in ("linear", "softmax") for batch in (1, 4)
    }
    assert "sdpa causal" in done.stdout.partition("bench: ms")[2]
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == len(found["rows"])


def test_the_laws_of_all_mechanisms_are_run_once(gpu):
    tasks = gpu._tasks(False)
    pairs = [(spec, law) for spec, laws in tasks for law in laws]
    assert len(set(pairs)) == len(pairs)
    assert {law for _, law in pairs} == set(testing.laws())
    assert {spec.partition("(")[0] for spec, _ in pairs} == set(longspan.list_mechanisms())
    assert [spec for spec, _ in tasks[: len(gpu.MECHANISMS)]] == list(gpu.MECHANISMS)


def test_a_law_that_does_not_apply_has_no_row(gpu):
    rows = gpu._laws(("gla", ("causal", "cross"), "cpu"))
    assert [(row["law"], row["status"]) for row in rows] == [("causal", "passed")]


def planted(wrong):
    """A call of two operands that is wrong where the Triton kernels are forced."""

    def call(a, b):
        product = a * b
        return [wrong(product) if forced_backend() == "triton" else product]

    return call


@pytest.mark.whole
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mistake", ["none", "values", "gradients", "NaN", "bits"])
def test_a_kernel_that_is_wrong_fails(gpu, mistake, dtype):
    generator = torch.Generator().manual_seed(0)
    wrong = {
        "none": lambda x: x,
        "values": lambda x: 1.02 * x,
        "gradients": lambda x: 0.98 * x + 0.02 * x.detach(),
        "NaN": lambda x: x * torch.nan,
        "bits": lambda x: x + 1e-4 * torch.randn(x.shape, generator=generator).to(x.dtype),
    }[mistake]
    row = gpu._kernel(planted(wrong), [torch.randn(7, 5).to(dtype) for _ in range(2)], dtype)
    assert row["status"] == ("passed" if mistake == "none" else "failed")
    assert row["same_bits"] == (mistake not in ("NaN", "bits"))
    if mistake in ("values", "gradients"):
        assert row["worst"].startswith({"values": ("output", "gradient"), "gradients": "gradient"}[mistake])


def test_a_kernel_that_is_not_served_has_its_reason(gpu):
    def call(a):
        return [longspan.linear_attention(a, a, a)]

    # 256 channels are too many for the kernels.
    row = gpu._kernel(call, [torch.randn(1, 1, 3, 256, requires_grad=True)], torch.float32)
    assert row["status"] == "not served"
    assert row["note"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "--device cpu is only to try the script: add --quick"),
        (
            ["--limits", "laws=300,tests"],
            f"--limits laws=300,tests is not of the form laws=300,tests=200; the parts are {', '.join(PARTS)}",
        ),
        (
            ["--limits", "lows=300"],
            f"--limits lows=300 is not of the form laws=300,tests=200; the parts are {', '.join(PARTS)}",
        ),
        (["--parts", "laws,none"], f"unknown part 'none'; the parts are {', '.join(PARTS)}"),
        pytest.param(
            [],
            f"torch {torch.__version__} finds no CUDA GPU; --device cpu --quick tries the script without one",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_run_is_one_line_and_code_2(gpu, words, said, capsys):
    assert gpu.main(words) == 2
    assert capsys.readouterr().err == f"lab/gpu.py: {said}\n"


def test_missing_packages_are_named(gpu, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "safetensors" else find(name))
    assert gpu.main(["--device", "cpu", "--quick"]) == 2
    said = capsys.readouterr().err
    assert said == "lab/gpu.py: missing: safetensors (for import longspan); install them with pip\n"


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


def test_limits_can_be_changed(gpu, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(gpu, "_ended", lambda command, environment, limit: seen.append(round(limit)) or "done")
    gpu.main(["--device", "cpu", "--quick", "--parts", "machine,laws", "--limits", "laws=77", "--out", str(tmp_path)])
    assert seen == [gpu.PARTS["machine"], 77]


FAILED = [
    {"part": "laws", "mechanism": "gla", "law": "causal", "status": "failed", "error": 0.5, "note": "off by 0.5"},
    {"part": "kernels", "kernel": "delta_rule", "n": 7, "dim": 64, "dtype": "float32", "status": "failed", "note": "x"},
    {"part": "bench", "candidate": "sdpa causal", "mode": "forward", "n": 64, "dim": 16, "error": "OutOfMemoryError"},
]


def test_failures_and_parts_that_do_not_end_are_exit_code_1(gpu, monkeypatch, tmp_path, capsys):
    def run(command, environment, limit):
        with (tmp_path / "gpu.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in FAILED) + '{"part": "la')
        return "done"

    monkeypatch.setattr(gpu, "_ended", run)
    assert gpu.drive(["laws"], "cpu", True, tmp_path) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == FAILED
    out = capsys.readouterr().out
    assert "FAILED gla, causal: off by 0.5" in out
    assert "FAILED delta_rule, 7 x 64, float32: x" in out
    assert "OutOfMemoryError" in out
    monkeypatch.setattr(gpu, "_ended", lambda *_: "stopped at its limit of 3 s")
    assert gpu.drive(["bench"], "cpu", True, tmp_path) == 1
    assert "bench: stopped at its limit of 3 s" in capsys.readouterr().out


@pytest.fixture
def pages(monkeypatch, tmp_path):
    """The script that writes the pages, in an empty folder."""
    for name, value in {"PAGE": "performance.md", "RAW": "benchmarks", "RESULTS": "results"}.items():
        monkeypatch.setattr(performance, name, tmp_path / value)
    performance.PAGE.write_text("before\n<!-- gpu:begin -->\n<!-- gpu:end -->\nafter\n")
    return performance


def measured(folder, parts, rows, **more):
    folder.mkdir()
    found = {"benchmark": "gpu", "card": "NVIDIA H100 80GB HBM3", "quick": False, "parts": parts, "rows": rows} | more
    (folder / "gpu.json").write_text(json.dumps(found))
    return str(folder)


def bench_row(candidate, mode, ms):
    sizes = {"batch": 8, "heads": 16, "n": 4096, "dim": 64}
    return {"part": "bench", "candidate": candidate, "mode": mode, **sizes, "ms": ms, "peak_gib": 1.0}


def test_without_figures_the_page_states_that_nothing_is_measured(pages):
    pages.main()
    assert "Not measured yet. `make gpu`" in pages.PAGE.read_text()


def test_a_second_run_of_a_card_replaces_the_parts_that_it_has(pages, tmp_path):
    step = {"part": "decode", "mechanism": "linear", "batch": 1, "how": "graph"}
    rows = [bench_row("linear_attention, triton", "forward", 0.251), step | {"token_ms": 0.271}]
    pages.main(measured(tmp_path / "first", {"bench": "done", "decode": "stopped at its limit of 9 s"}, rows))
    assert "| `linear` | 1 | - | 0.271 |" in pages.PAGE.read_text()
    raw = pages.RAW / "nvidia-h100-80gb-hbm3.md"
    assert "decode: stopped at its limit of 9 s" in raw.read_text()
    law = {"part": "laws", "mechanism": "gla", "law": "causal", "status": "failed", "error": 0.5, "note": "differs"}
    rows = [law, step | {"token_ms": 0.2}]
    pages.main(measured(tmp_path / "second", {"laws": "done", "decode": "done"}, rows))
    text = pages.PAGE.read_text()
    assert "| linear attention | 4096 | 64 | 0.25 / - |" in text
    assert "| `linear` | 1 | - | 0.200 |" in text
    assert "0.271" not in text
    assert "FAILED gla, causal: differs" in raw.read_text()
    assert "stopped" not in raw.read_text()


def test_a_trial_is_no_measurement(pages, tmp_path):
    with pytest.raises(ValueError, match="trial with --quick"):
        pages.main(measured(tmp_path / "trial", {}, [], quick=True))
