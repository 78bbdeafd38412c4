"""Planted bugs: each change in ``tests/mutants.toml``, made in a copy of the sources, fails a test that it names.

A mutant is a table:

* ``what`` goes wrong, in a few words;
* ``file``, a path under a package's folder, and ``function``, a qualified name in it such as ``Class.method`` ("": the
  module itself); a file that has moved is found by its name, or else by the function;
* ``old``, an expression or a statement that occurs there once, and ``new``, which takes its place. They are compared on
  the syntax tree, so a change of the layout is none. In C++ they are pieces of text, and there is no function;
* ``tests``, node ids of which at least one must fail.

The long form plants all of them. The short one checks that each still applies, and plants two whose tests are not
slow. ``attacks.mutate`` draws new ones for any module.
"""

import ast
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import Case, _edits

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "src" / "longspan", ROOT / "lab" / "src" / "longspan_lab")
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
LIMIT = 300  # seconds for the tests of one mutant
# With tests that carry a marker, since a mutant may need one that takes long.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]


class Mutant(NamedTuple):
    """One planted bug; see above."""

    what: str
    file: str
    function: str
    old: str
    new: str
    tests: list[str]

    @property
    def label(self) -> str:
        return f"{self.file}: {self.what}"


def read() -> list[Mutant]:
    """All mutants."""
    tables = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{"function": "", **table}) for table in tables]


LIST = read()
PLANTED = 2  # of the short form
SHORT = 1 + PLANTED
LONG = 2 + len(LIST)

parsed = functools.cache(ast.parse)


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """Whether the mutants apply, and then mutants one by one, in an order that depends on the seed."""
    found: list[Case] = [("all apply", functools.partial(unfit, LIST))]
    if count > SHORT:  # the short form is part of the suite that runs these tests
        found.append(("their tests pass without them", functools.partial(fails_anyway, LIST)))
    order = random.Random(seed).sample(LIST, len(LIST))
    if count <= SHORT:
        order = [mutant for mutant in order if not any(map(_slow, mutant.tests))]
    found += [(mutant.label, functools.partial(survives, mutant, folder)) for mutant in order]
    yield from found[:count]


def fails_anyway(mutants: list[Mutant]) -> str | None:
    """Which of the named tests fail with nothing planted, and so would detect nothing."""
    tests = sorted({found(test) for mutant in mutants for test in mutant.tests})
    command = [*PYTEST, "-n", "logical", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-3000:]}"


def unfit(mutants: list[Mutant]) -> str | None:
    """Which mutants cannot be planted, and why: no such function, expression or test, or one label twice."""
    said = [f"{mutant.label}: {reason}" for mutant in mutants if (reason := _unfit(mutant))]
    labels = [mutant.label for mutant in mutants]
    said += [f"{label}: two mutants have this label" for label in sorted({x for x in labels if labels.count(x) > 1})]
    return "\n".join(said) or None


def _unfit(mutant: Mutant) -> str:
    try:
        changed(mutant)
        for test in mutant.tests:
            found(test)
    except ValueError as error:
        return str(error)
    return "" if mutant.tests else "names no test"


def changed(mutant: Mutant) -> tuple[Path, str]:
    """(the file, its text with the mutant). Raises ValueError if it does not apply."""
    reason = ""
    for files in candidates(mutant):
        fits = []
        for path in files:
            try:
                fits.append((path, _changed(mutant, path.read_text(encoding="utf-8"))))
            except ValueError as error:
                reason = reason or str(error)
        if len(fits) > 1:
            raise ValueError(f"applies to {' and '.join(path.relative_to(ROOT).as_posix() for path, _ in fits)}")
        if fits:
            return fits[0]
    raise ValueError(reason or f"there is no file {mutant.file}")


def _changed(mutant: Mutant, text: str) -> str:
    if not mutant.file.endswith(".py"):
        if (times := text.count(mutant.old)) != 1:
            raise ValueError(f"{mutant.old!r} occurs {times} times")
        return text.replace(mutant.old, mutant.new)
    before = parsed(text)
    after = ast.unparse(_edits.replaced(before, mutant.function, mutant.old, mutant.new))
    if after == ast.unparse(before):
        raise ValueError("the change has no effect")
    return after


def candidates(mutant: Mutant) -> Iterator[list[Path]]:
    """The files that a mutant may mean: its own, then those of that name, then those with a function of that name."""
    path = Path(mutant.file)
    own = [package / path for package in PACKAGES if (package / path).is_file()]
    yield own
    files = sorted(file for package in PACKAGES for file in package.rglob(f"*{path.suffix}"))
    yield [one for one in files if one not in own and _name(one) == _name(path)]
    if last := mutant.function.rpartition(".")[2]:
        yield [one for one in files if re.search(rf"\b(def|class) {last}\b", one.read_text(encoding="utf-8"))]


def _name(path: Path) -> str:
    return path.parent.name if path.stem == "__init__" else path.stem


def found(test: str) -> str:
    """A node id with the path at which its file is now. Raises ValueError if there is no such test."""
    path, *names = re.sub(r"\[.*", "", test, flags=re.DOTALL).split("::")
    files = [ROOT / path] if (ROOT / path).is_file() else sorted((ROOT / "tests").rglob(Path(path).name))
    for file in files:
        text = file.read_text(encoding="utf-8")
        if "from ops.laws import collected" in text:
            text += (ROOT / "tests" / "ops" / "laws.py").read_text(encoding="utf-8")
        if all(re.search(rf"^\s*(async def|def|class) {name}\b", text, re.MULTILINE) for name in names):
            return file.relative_to(ROOT).as_posix() + test[len(path) :]
    raise ValueError(f"there is no test {test}")


def _slow(test: str) -> bool:
    """Whether a test or its class carries the marker ``slow``."""
    path, *names = re.sub(r"\[.*", "", found(test), flags=re.DOTALL).split("::")
    defined = [
        node
        for node in ast.walk(parsed((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names
    ]
    return any(ast.unparse(marker) == "pytest.mark.slow" for node in defined for marker in node.decorator_list)


def survives(mutant: Mutant, folder: Path) -> str | None:
    """Plant a mutant, run its tests, and take it out again; what happened if none of them failed."""
    try:
        source, text = changed(mutant)
        tests = [found(test) for test in mutant.tests]
    except ValueError as error:
        return str(error)
    folders = _copied(folder)
    copy = folder / source.relative_to(ROOT)
    copy.write_text(text, encoding="utf-8")
    # No bytecode is kept: two changes within a second and of one length would share it.
    more = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
    if "native" in source.parts:
        more["LONGSPAN_CACHE"] = str(folder / "cache")
    command = [*PYTEST, "-x", *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its tests had not ended after {LIMIT} seconds"
    finally:
        shutil.copy2(source, copy)
    if done.returncode == 0:
        return f"{mutant.old!r} -> {mutant.new!r} and all of {', '.join(mutant.tests)} pass"
    # 1: tests ran, and some failed; a signal that native code gets for what it did has ended them as well.
    if done.returncode != 1 and -done.returncode not in CRASHES:
        return f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"
    return None


def _copied(folder: Path) -> list[Path]:
    """The folders of copies of the packages, made once."""
    for package in PACKAGES:
        copy = folder / package.relative_to(ROOT)
        if not copy.is_dir():
            shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return [folder / package.relative_to(ROOT).parent for package in PACKAGES]
