"""The scripts in examples/ run with tiny flags and explain every flag."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

EXAMPLES = Path(__file__).parents[2] / "examples"
# Flags so small that a run takes seconds, and a package without which a script cannot run.
RUNS = {
    "char_lm": ("--steps 2 --length 32 --batch 2 --dim 16 --depth 1 --tokens 9 --out model", None),
    "fork_states": ("--forks 2 --tokens 5", None),
    "hf_hybrid": ("--length 70 --width 64 --rounds 1", "transformers"),
    "linearize": ("--size tiny --specs linear --out run", None),
    "long_classifier": ("--length 40 --steps 2 --batch 2 --dim 16", None),
    "pretrain_350m": ("--small --steps 2 --out model", None),
    "hf_trainer": ("--steps 2 --length 20 --batch 2 --dim 16 --out run", "accelerate"),
    "few_examples": ("--examples 4 --bytes 40 --epochs 1 --rates 0.01", "peft"),
    "finetune_cost": ("--width 64 --layers 4 --vocabulary 256 --sequences 3 --bytes 64 --steps 1 --rounds 1", "peft"),
    "sentence_encoder": ("--tiny --out run", "transformers"),
    "poems": ("load --streams 2", "uvicorn"),
    "lora": ("--steps 2 --rows 2 --out run", "peft"),
}

pytestmark = pytest.mark.full


def run(name, *flags, folder):
    """What an example prints; it must succeed."""
    paths = {"PYTHONPATH": str(Path(longspan.__file__).parents[1])}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *flags]
    done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_has_a_run():
    assert sorted(RUNS) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(name, tmp_path):
    flags, package = RUNS[name]
    if package:
        pytest.importorskip(package)
    assert run(name, *flags.split(), folder=tmp_path)
    # What it wrote is where a flag said.
    named = {word for flag, word in zip(flags.split(), flags.split()[1:], strict=False) if flag == "--out"}
    assert {path.name for path in tmp_path.iterdir()} == named


def test_a_saved_model_of_an_example_loads(tmp_path):
    flags = RUNS["char_lm"][0]
    run("char_lm", *flags.split(), "--attention", "linear", folder=tmp_path)
    assert longspan.load(tmp_path / "model").config.attention == "linear"


def losses(folder, processes, *flags):
    """The losses that the pretraining prints."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*start, str(EXAMPLES / "pretrain_350m.py"), "--small", *flags]
    paths = {"PYTHONPATH": str(Path(longspan.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_pretraining_on_two_processes_equals_one(tmp_path):
    one = losses(tmp_path, 1)
    assert one[-1] < one[0] - 0.3
    assert losses(tmp_path, 2, "--sequence", "2", "--strategy", "fsdp") == pytest.approx(one, abs=2e-3)


@pytest.mark.parametrize("name", RUNS)
def test_every_flag_of_an_example_has_help(name, monkeypatch, capsys):
    if RUNS[name][1]:
        pytest.importorskip(RUNS[name][1])
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(path), run_name="__main__")
    text = path.read_text(encoding="utf-8")
    assert text.count("add_argument(") == text.count("help=")
    assert f"{name}.py" in capsys.readouterr().out
