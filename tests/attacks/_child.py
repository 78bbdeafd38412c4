"""Run cases one after the other in a child process, since a case can crash it.

A crash is the failure of its case, and a new process runs the remaining ones.
"""

import functools
import importlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from . import Case


def cases(module: str, seed: int, count: int) -> Iterator[Case]:
    """The cases of a module whose ``attack(dice)`` runs one."""
    results: dict[int, str] = {}
    for i in range(count):
        yield f"{i}", functools.partial(_answer, module, seed, i, count, results)


def _answer(module: str, seed: int, i: int, count: int, results: dict[int, str]) -> str | None:
    """The result of a case, which runs in one process with those after it."""
    if i not in results:
        command = [sys.executable, "-m", "attacks._child", module, *map(str, (seed, i, count))]
        folder = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        lines = [line.split("\t", 2) for line in done.stdout.splitlines() if line.startswith("case\t")]
        results |= {int(number): said for _, number, said in lines}
        if i not in results:
            return f"the process ended with code {done.returncode}: {done.stderr[-300:]}"
    return results[i] or None


def main(module: str, seed: str, begin: str, count: str) -> None:
    """The cases from ``begin`` on, one line each."""
    attack = importlib.import_module(module).attack
    for i in range(int(begin), int(count)):
        print(f"case\t{i}\t{attack(random.Random(f'{seed}-{i}')) or ''}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
