"""No kernel reads or writes beyond its operands, as the compiler's address sanitizer sees it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.ops.native.build import toolchain

ROOT = Path(__file__).parents[2]
BATTERY = tuple(
    f"tests/{part}.py"
    for part in (
        "ops/test_linear_native",
        "ops/test_sequence",
        "generation/test_engine",
        "generation/test_engine_recurrent",
        "ops/test_op_laws",
        "ops/test_tiles",
        "ops/test_chosen",
        "ops/test_polynomial_op",
        "attention/test_path",
    )
)


def runtime() -> str:
    """The libraries that must be loaded before all else; "" where there is no sanitizer."""
    try:
        compiler = toolchain.find_compiler()
        # With the library whose exceptions it watches, which Python alone would not have loaded yet.
        names = ("libclang_rt.asan-x86_64.so" if toolchain.is_clang(compiler) else "libasan.so", "libstdc++.so.6")
        found = [toolchain.run([*compiler, f"-print-file-name={name}"]).strip() for name in names]
    except toolchain.Unavailable:
        return ""
    return " ".join(found) if all(map(os.path.isabs, found)) else ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or not runtime(), reason="there is no address sanitizer here"),
]


@pytest.fixture
def run(tmp_path):
    """``run(package, *arguments)``: Python on a copy of longspan whose kernels are compiled with the sanitizer."""
    compiler = tmp_path / "compiler"
    command = " ".join(toolchain.find_compiler())
    # With all optimizations the compiler takes eight times as long over the checks.
    compiler.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {command} -fsanitize=address "$@" -g -O1\n')
    compiler.chmod(0o755)
    environment = os.environ | {
        "CXX": str(compiler),
        "LONGSPAN_CACHE": str(tmp_path / "cache"),
        "LD_PRELOAD": runtime(),
        "ASAN_OPTIONS": "detect_leaks=0",
    }

    def call(package, *arguments):
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(package)},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def test_the_native_battery(run):
    # The sanitizer ends the process: what pytest had captured of its report would be lost.
    done = run(ROOT / "src", "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", *BATTERY)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[:4000]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_number_beyond_the_end_is_reported(run, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "src" / "longspan" / "ops" / "native" / "linear" / "step.cpp"
    right = "narrowed(y, values, out + row * values"
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, f"{right} + 1"))
    done = run(tmp_path / "src", "-c", "from longspan.ops.native import build; build.load('linear/step')")
    assert done.returncode != 0
    assert "the compiled kernels cannot be tested" in done.stderr
    assert "ERROR: AddressSanitizer: " in done.stderr
