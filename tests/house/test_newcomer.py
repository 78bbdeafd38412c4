"""The package that CONTRIBUTING describes: once installed, its mechanism works like a built-in one."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import longspan
import longspan_lab

ROOT = Path(__file__).parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "my_package"
version = "0.1"

"""
SMALL = "--run.steps 2 --model.dim 16 --model.heads 2 --model.depth 2 --model.feedforward 16".split()


def run(*command, folder):
    """Run a command that must succeed and return its output; of this repository it sees the package alone."""
    sources = [str(Path(package.__file__).parents[1]) for package in (longspan, longspan_lab)]
    paths = {"PYTHONPATH": os.pathsep.join(sources), "MPLCONFIGDIR": str(folder)}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with the package and the test of CONTRIBUTING, not installed."""
    text, folder = CONTRIBUTING.read_text(encoding="utf-8"), tmp_path_factory.mktemp("newcomer")

    def block(language):
        return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]

    code = block("python")
    (folder / "src" / "my_package").mkdir(parents=True)
    outside = code.replace("from .base import", "from longspan import")
    assert outside != code
    (folder / "src" / "my_package" / "__init__.py").write_text(outside)
    (folder / "pyproject.toml").write_text(PROJECT + block("toml"))
    (folder / "test_mine.py").write_text(block("py"))
    return folder


@pytest.fixture(scope="module")
def python(package):
    """The Python of an environment where the package is installed; everything else comes from this environment."""
    pytest.importorskip("hatchling", reason="builds a package")
    home = package / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, folder=package)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = home / "bin" / "python"
    install = "-m pip --python {} install -q --no-deps --no-index --no-build-isolation --disable-pip-version-check ."
    run(sys.executable, *install.format(python).split(), folder=package)
    return python


# In one process, since each loads torch.
SESSION = """
import sys
from longspan import list_mechanisms, testing
from longspan.cli import main

assert "my_package" not in sys.modules
for line in {lines!r}:
    assert main(line) == 0, line
assert "running_mean" in list_mechanisms()
assert testing.check("parallel_is_recurrent", "running_mean").status == "passed"
"""


def first_line(package) -> str:
    """The beginning of the mechanism's docstring, short enough that a terminal does not wrap it."""
    tree = ast.parse((package / "src" / "my_package" / "__init__.py").read_text(encoding="utf-8"))
    (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RunningMean"]
    return " ".join((ast.get_docstring(cls) or "").split()[:5])


@pytest.mark.full
def test_it_is_listed_shown_trained_and_generated_from(package, python):
    pytest.importorskip("lightning", reason="trains")
    lines = [
        ["show", "running_mean", "--dim", "16", "--heads", "2"],
        ["list"],
        ["train", "--config", "digits", "--model.attention", "running_mean; linear", *SMALL, "--run.out", "r"],
        ["generate", "r", "--count", "2", "--out", "r.png"],
        ["cite", "r"],
    ]
    out = run(python, "-P", "-c", SESSION.format(lines=lines), folder=package)
    assert first_line(package) in out
    assert "\nrunning_mean " in out
    assert "r: 2 steps" in out
    assert "zhang2018accelerating" in out
    assert (package / "r.png").stat().st_size > 100


@pytest.mark.slow
def test_its_tests_take_the_laws(package, python):
    out = run(python, "-P", "-m", "pytest", "-v", "-p", "no:cacheprovider", "test_mine.py", folder=package)
    for law in ("parallel_is_recurrent", "padding", "compiles"):
        assert f"test_law[running_mean-{law}] PASSED" in out
        assert f"test_law[running_mean; linear-{law}] PASSED" in out
    assert "skipped" not in out


@pytest.mark.slow
def test_it_is_benchmarked(package, python):
    pytest.importorskip("matplotlib", reason="the benchmarks draw")
    words = "bench attention running_mean softmax@module --lengths 33,65 --heads 2 --size 8 --rounds 1 --out b".split()
    run(python, "-P", "-m", "longspan", *words, folder=package)
    rows = json.loads((package / "b" / "attention.json").read_text())["rows"]
    assert {row["candidate"] for row in rows} == {"running_mean", "softmax@module"}


@pytest.mark.slow
def test_it_works_before_it_is_installed(package):
    """The commands of CONTRIBUTING run in the folder of the module."""
    pytest.importorskip("lightning", reason="trains")
    text = CONTRIBUTING.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("longspan ") and "--import my_package" in line]
    assert lines
    for line in lines:
        words = shlex.split(line)[1:]
        run(
            sys.executable,
            "-P",
            "-m",
            "longspan",
            *words,
            *(SMALL if words[0] == "train" else ()),
            folder=package / "src",
        )
    if any(shlex.split(line)[1] == "train" for line in lines):
        assert (package / "src" / "runs" / "mine" / "config.yaml").is_file()
