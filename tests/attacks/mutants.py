"""Planted bugs: each change in ``tests/mutants/*.toml``, made in a copy of ``src``, fails a test that it names.

A mutant is a table: ``what`` goes wrong, in a few words; ``file`` under ``src/longspan``; ``old``, a text that occurs
there exactly once, and ``new`` in its place; ``tests``, node ids of which at least one must fail. The long form plants
all of them, the short one asks whether each still applies, and plants a few.

They are data, for mutation tools do not fit: cosmic-ray 8.7 plans 755 changes of ``ops/gated.py`` alone and runs one
command for each, here minutes of tests; mutmut 3.8 chooses among its changes by a wrapper around each function, which
graphs that are compiled whole would have to trace; neither changes C++, or knows which mistakes people make.
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

from . import Case

ROOT = Path(__file__).parents[2]
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
LIMIT = 300  # seconds for the tests of one mutant
# With tests that carry a marker, since a mutant may need one that takes long.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]


class Mutant(NamedTuple):
    """One planted bug; see above."""

    what: str
    file: str
    old: str
    new: str
    tests: list[str]

    @property
    def label(self) -> str:
        return f"{self.file}: {self.what}"


def read() -> dict[str, list[Mutant]]:
    """All mutants, by the name of their file of data."""
    return {
        path.stem: [Mutant(**table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]
        for path in sorted((ROOT / "tests" / "mutants").glob("*.toml"))
    }


LISTS = read()
PLANTED = 2  # of the short form
SHORT = len(LISTS) + PLANTED
LONG = len(LISTS) + 1 + sum(map(len, LISTS.values()))


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """Whether the mutants of each list apply, and then mutants one by one, in an order that the seed says."""
    found: list[Case] = [(f"{name} applies", functools.partial(unfit, mutants)) for name, mutants in LISTS.items()]
    mutants = [mutant for some in LISTS.values() for mutant in some]
    order = random.Random(seed).sample(mutants, len(mutants))
    if count > SHORT:  # the short form is part of the suite that runs these tests
        found.append(("their tests pass without them", functools.partial(fails_anyway, mutants)))
    found += [(mutant.label, functools.partial(survives, mutant, folder)) for mutant in order]
    yield from found[:count]


def fails_anyway(mutants: list[Mutant]) -> str | None:
    """Which of the named tests fail with nothing planted, and so would see nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    command = [*PYTEST, "-n", "logical", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-3000:]}"


def unfit(mutants: list[Mutant]) -> str | None:
    """What keeps mutants from being planted: a text that is not there once, no Python, a test that does not exist."""
    said = [f"{mutant.label}: {reason}" for mutant in mutants if (reason := _unfit(mutant))]
    labels = [mutant.label for mutant in mutants]
    said += [f"{label}: there are two of that name" for label in sorted({x for x in labels if labels.count(x) > 1})]
    return "\n".join(said) or None


def _unfit(mutant: Mutant) -> str:
    source = ROOT / "src" / "longspan" / mutant.file
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    if (times := text.count(mutant.old)) != 1:
        return f"{mutant.old!r} occurs {times} times"
    if source.suffix == ".py":
        try:
            changed = ast.parse(text.replace(mutant.old, mutant.new))
        except SyntaxError as error:
            return f"{mutant.new!r} is no Python: {error}"
        if ast.dump(changed) == ast.dump(ast.parse(text)):
            return "the change says the same"
    for test in mutant.tests:
        path, *names = re.sub(r"\[.*", "", test, flags=re.DOTALL).split("::")
        tests = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not tests or not all(re.search(rf"^\s*(def|class) {name}\b", tests, re.MULTILINE) for name in names):
            return f"there is no test {test}"
    return "" if mutant.tests else "names no test"


def survives(mutant: Mutant, folder: Path) -> str | None:
    """Plant a mutant, run its tests, and take it out again; what happened if none of them failed."""
    if reason := _unfit(mutant):
        return reason
    package = _copied(folder)
    source = package / "longspan" / mutant.file
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    # No bytecode is kept: two changes within a second and of one length would share it.
    more = {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", "LONGSPAN_CACHE": str(folder / "cache")}
    command = [*PYTEST, "-x", *mutant.tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its tests had not ended after {LIMIT} seconds"
    finally:
        source.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return f"{mutant.old!r} -> {mutant.new!r} and all of {', '.join(mutant.tests)} pass"
    # 1: tests ran, and some failed; a signal that native code gets for what it did has ended them as well.
    if done.returncode != 1 and -done.returncode not in CRASHES:
        return f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"
    return None


def _copied(folder: Path) -> Path:
    """A copy of ``src`` in the folder, made once."""
    package = folder / "src"
    if not package.is_dir():
        shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("__pycache__"))
    return package
