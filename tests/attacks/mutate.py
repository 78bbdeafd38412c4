"""Draw fresh mutants of a module and report those that its tests do not detect: ``python -m attacks.mutate MODULE``.

In a temporary copy of the repository the tool changes one expression or statement of the module at a time, as
``_operators.py`` lists, and runs the tests until the first failure. A mutant that passes all of them is a survivor: the
line needs a test, or it means the same. A run of the tests that takes too long is ended, and has detected its mutant.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan._utils.cache_dirs import cache_folder

from . import _operators

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
PACKAGES = ("src/longspan", "lab/src/longspan_lab")
# Folders of ``ops`` whose operations have laws, and the names of those in tests/ops/families.py.
FAMILIES = {
    "gated": "decay|delta|general",
    "linear": "linear",
    "scan": "diagonal|selective",
    "convolution": "convolution",
}
LEFT = (".git", ".venv*", "__pycache__", ".*_cache", "_build", "results", "dist", "runs", "demo", "*.egg-info")


def find(module: str, root: Path) -> Path:
    """The file of a module: its path, its path below the package, or its dotted name. Raises ValueError if none."""
    for package in (root / one for one in PACKAGES):
        dotted = module.removeprefix(f"{package.name}.").replace(".", "/")
        tried = [root / module, Path(module).resolve(), package / module, package / f"{dotted}.py", package / dotted]
        for path in (*tried, *(one / "__init__.py" for one in tried)):
            if path.is_file() and path.suffix == ".py" and package in path.parents:
                return path
    raise ValueError(
        f"no module {module!r} in {' or '.join(PACKAGES)}; pass a path in one of them, such as ops/linear/causal.py"
    )


def package_of(path: Path, root: Path) -> Path:
    """The folder of the package that a file is in."""
    return next(root / one for one in PACKAGES if root / one in path.parents)


def dotted(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(package_of(path, root).parent).with_suffix("").parts).removesuffix(".__init__")


def default_tests(path: Path, root: Path) -> list[str]:
    """Which tests belong to a module: those named after it, or else those that import it or its package.

    Returns:
        Node ids, paths relative to ``root``, with the laws of a mechanism or of the operations in the folder.
    """
    name = path.parent.name if path.stem == "__init__" else path.stem
    files = sorted((root / "tests").rglob("test_*.py"))
    mirrored = root / "tests" / path.relative_to(package_of(path, root)).parent / f"test_{name}.py"
    named = [one for one in files if one == mirrored or re.fullmatch(rf"test_{name.lstrip('_')}(_.*)?", one.stem)]
    full = dotted(path, root)
    imported = {one: _imports(one) for one in files}
    users = [one for one in files if any(got == full or got.startswith(f"{full}.") for got in imported[one])]
    if not named and not users:
        package = full.rpartition(".")[0]
        users = [one for one in files if "." in package and package in imported[one]]
    found = [one.relative_to(root).as_posix() for one in dict.fromkeys([*named, *users])]
    if not found:
        raise ValueError(f"no test is named after {full} or imports it: pass --tests")
    return [*found, *_laws(path, root)]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] in ("longspan", "longspan_lab")}


def _laws(path: Path, root: Path) -> list[str]:
    """The laws of a mechanism, or of the operations in a folder of ``ops``, one node id each."""
    name = re.search(r'^    name(?:, \w+)* = "(\w+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    if path.parent.name == "attention" and name is not None:
        laws = ["attention/test_attention.py", "attention/test_limits.py"]
        wanted = rf"::test_law\[\w+-{name[1]}(\(.*\))?\]$|test_limits\.py::.*\[{name[1]}(\(.*)?[] ]"
    elif path.parent.parent.name == "ops" and path.parent.name in FAMILIES:
        laws, wanted = ["ops/test_op_laws.py"], rf"\[({FAMILIES[path.parent.name]})-"
    else:
        return []
    files = [str(root / "tests" / one) for one in laws if (root / "tests" / one).is_file()]
    if not files:
        return []
    command = [*PYTEST, "--collect-only", "-o", "addopts=-q", *files]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if re.search(wanted, line)]


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the repository in a temporary folder, with its bytecode, which later runs read but do not write."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*LEFT), symlinks=True)
        # The compiled kernels, which would take a minute to make again. Mutants never write into the real cache.
        if (kernels := cache_folder() / "native").is_dir():
            # Without what another process is compiling just now.
            unfinished = shutil.ignore_patterns("*.lock", ".*")
            shutil.copytree(kernels, copy / "cache" / "native", ignore=unfinished)
        folders = [copy / one for one in PACKAGES]
        subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], check=False, capture_output=True)
        yield copy


def run(tests: list[str], copy: Path, timeout: float) -> tuple[str, str, float]:
    """Run tests in the copy until one fails -> ("passed", "failed" or "timeout", the first failure, seconds)."""
    paths = os.pathsep.join(str((copy / one).parent) for one in PACKAGES)
    more = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "LONGSPAN_CACHE": str(copy / "cache")}
    command = [*PYTEST, "-x", *tests]
    begin = time.monotonic()
    # A file, since a process that the tests started may hold a pipe open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            command, cwd=copy, env=os.environ | more, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "timeout", f"not ended after {timeout:.0f} s", time.monotonic() - begin
        finally:
            # The processes of the tests, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - begin
        file.seek(0)
        out = file.read()
    if process.returncode == 0:
        return "passed", "", seconds
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", out, re.MULTILINE)
    last = (out.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return "failed", failed[1] if failed else last, seconds


def mutate(
    path: Path, tests: list[str], root: Path, *, seed: int, count: int, timeout: float = 0.0, kept: Path | None = None
) -> dict[str, Any]:
    """Plant ``count`` mutants of a file one by one, and print a line for each.

    Args:
        timeout: seconds for the tests of one mutant; 0: 30 and five times what they take without one.
        kept: a JSON file for the result, written after each mutant.
    """
    text = path.read_text(encoding="utf-8")
    chosen = _operators.sample(text, seed, count)
    result: dict[str, Any] = {"module": dotted(path, root), "seed": seed, "tests": tests, "mutants": []}
    with copied(root) as copy:
        print(f"{result['module']}: {len(chosen)} mutants; tests: {_few(tests)}", flush=True)
        status, first, seconds = run(tests, copy, timeout or 3600)
        if status != "passed":
            raise ValueError(f"the tests do not pass without a mutant: {first}")
        limit = timeout or 30 + 5 * seconds
        target = copy / path.relative_to(root)
        for number, change in enumerate(chosen, 1):
            target.write_text(_operators.applied(text, change), encoding="utf-8")
            status, first, seconds = run(tests, copy, limit)
            status = {"passed": "survived", "failed": "detected", "timeout": "timeout"}[status]
            where = f"{path.relative_to(root).as_posix()}:{change.line}"
            print(f"[{number}/{len(chosen)}] {status} {seconds:.1f} s  {where} {change.words}", flush=True)
            row = {"status": status, "line": change.line, "function": change.function, "operator": change.operator}
            row |= {"old": change.old, "new": change.new, "by": first, "seconds": round(seconds, 1)}
            result["mutants"].append(row)
            if kept is not None:
                kept.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def _few(tests: list[str]) -> str:
    return " ".join(tests[:4]) + (f" and {len(tests) - 4} more" if len(tests) > 4 else "")


def summary(result: dict[str, Any]) -> str:
    """The survivors, and how many mutants were detected."""
    rows = result["mutants"]
    lines = [
        f"survived: line {row['line']} in {row['function'] or 'the module'}, {row['operator']}:\n"
        f"  - {row['old']}\n  + {row['new']}"
        for row in rows
        if row["status"] == "survived"
    ]
    return "\n".join([*lines, f"{len(rows) - len(lines)} of {len(rows)} mutants detected"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m attacks.mutate", description=__doc__)
    parser.add_argument("module", help="such as ops/linear/causal.py or longspan.ops.linear.causal")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--count", type=int, default=20, help="number of mutants")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="files or node ids; default: by name and imports")
    parser.add_argument("--timeout", type=float, default=0.0, help="seconds for one mutant; default: by a first run")
    parser.add_argument("--json", type=Path, help="write the result into this file")
    args = parser.parse_args(argv)
    try:
        if args.count < 1:
            raise ValueError(f"--count {args.count} must be at least 1")
        path = find(args.module, ROOT)
        tests = args.tests or default_tests(path, ROOT)
        result = mutate(path, tests, ROOT, seed=args.seed, count=args.count, timeout=args.timeout, kept=args.json)
    except ValueError as error:
        print(f"python -m attacks.mutate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(summary(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
