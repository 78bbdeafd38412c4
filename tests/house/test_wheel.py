"""A wheel with compiled kernels serves where there is no compiler; one without serves everywhere."""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from longspan.ops.native.build import instruction_sets, prebuilt, toolchain, trial

ROOT = Path(__file__).parents[2]
BUILD = ("-m", "hatchling", "build", "-t", "wheel", "-d")
try:
    COMPILER = toolchain.find_compiler()
    REASON = "clang makes no wheels for Linux" if sys.platform == "linux" and toolchain.is_clang(COMPILER) else ""
except toolchain.Unavailable as error:
    REASON = str(error)

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(bool(REASON), reason=REASON)


def run(*command, **environment):
    """What a command prints; it must succeed."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """A Python with the packages that ``make wheel`` installs and those that they need, and nothing else."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    plan = ["make", "--dry-run", "--always-make", "wheel"]
    lines = subprocess.run(plan, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    (line,) = [one for one in lines.splitlines() if "-m pip install" in one]
    left, needed = shlex.split(line.partition("-m pip install")[2]), {}
    while left:
        requirement = Requirement(left.pop())
        if requirement.name not in needed and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            needed[requirement.name] = importlib.metadata.distribution(requirement.name)
            left += needed[requirement.name].requires or []
    assert "torch" not in needed
    home = tmp_path_factory.mktemp("builder")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    (site,) = home.glob("lib/python*/site-packages")
    for distribution in needed.values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name))
    return home / "bin" / "python"


def wheel(builder, folder, **environment):
    """As ``make wheel`` builds it."""
    run(builder, *BUILD, folder, PYTHONPATH="", **environment)
    (path,) = folder.glob("*.whl")
    return path


def test_building_needs_no_torch(builder):
    done = subprocess.run([builder, "-c", "import torch"], capture_output=True, text=True, check=False)
    assert "No module named 'torch'" in done.stderr


def test_without_being_asked_a_wheel_has_no_compiled_code(builder, tmp_path):
    path = wheel(builder, tmp_path, LONGSPAN_PREBUILT="", CXX="no-such-compiler")
    assert path.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(path).namelist()
    assert not [name for name in names if "prebuilt/" in name or name.endswith((".so", ".o"))]
    native = {Path(name).name for name in names if name.startswith("longspan/ops/native/")}
    assert {file.name for file in (*toolchain.SOURCES, *toolchain.HEADERS)} <= native


def test_a_wheel_that_cannot_be_compiled_is_not_built(builder, tmp_path):
    environment = os.environ | {"LONGSPAN_PREBUILT": "1", "CXX": "no-such-compiler"}
    done = subprocess.run(
        [builder, *BUILD, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert (
        "the kernels could not be compiled: the C++ compiler that CXX='no-such-compiler' names was not found"
        in done.stdout + done.stderr
    )
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_an_installed_wheel_needs_no_compiler(builder, tmp_path):
    path = wheel(builder, tmp_path / "dist", LONGSPAN_PREBUILT="1")
    system = "macosx_11_0_arm64" if sys.platform == "darwin" else sysconfig.get_platform().replace("-", "_")
    if sys.platform == "linux":
        # What the libraries ask for is older than this machine's own libraries.
        system = rf"manylinux_2_\d+_{os.uname().machine}"
    assert re.search(rf"-py3-none-{system}\.whl$", path.name)
    assert (
        re.search(r"Tag: py3-none-(\w+)", zipfile.ZipFile(path).read("longspan-0.1.0.dist-info/WHEEL").decode())[1]
        in path.name
    )

    # An environment that has torch and all else from this one, but not this source tree.
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", path)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")

    (tmp_path / "empty").mkdir()
    bare = {"PATH": str(tmp_path / "empty"), "LONGSPAN_CACHE": str(tmp_path / "cache"), "CXX": "", "PYTHONPATH": ""}
    printed = run(python, "-P", "-m", "longspan", "doctor", **bare)
    assert f"prebuilt for {prebuilt.best().name}" in printed
    assert str(site) in printed
    kernels = (
        "ops/test_linear_native",
        "ops/test_sequence",
        "generation/test_engine",
        "ops/test_op_laws",
        "ops/test_tiles",
    )
    whole = " ".join(f"tests/{part}.py" for part in kernels)
    for battery in (whole, "tests/ops/test_threads.py -k not(becomes_visible)"):
        said = run(python, "-P", "-m", "pytest", "-p", "no:cacheprovider", *battery.split(), **bare)
        assert " passed" in said
        assert "skipped" not in said
    assert not (tmp_path / "cache").exists()

    # Each of the libraries that this processor can run, not the best one alone.
    folder = site / "longspan" / "ops" / "native" / "prebuilt"
    assert {file.stem for file in folder.glob("*.so")} == {one.name for one in instruction_sets.built()}
    for one in instruction_sets.usable():
        printed = run(python, "-P", "-m", "longspan", "doctor", **bare, LONGSPAN_ISA=one.name)
        assert f"prebuilt for {one.name}" in printed
        code = f"import sys, {trial.DECODE}; from {trial.__package__} import selftest; selftest.main(sys.argv[1])"
        assert trial.PASSED in run(python, "-P", "-c", code, folder / f"{one.name}.so", **bare)
