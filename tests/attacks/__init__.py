"""Attacks on the library: seeded cases, each of which must raise a clear error or give the right result.

An attack is one module of this package:

* its docstring's first line describes the cases and what must hold;
* ``SHORT`` and ``LONG``: how many cases the default suite and ``make attack`` take;
* ``cases(seed, count, folder)`` yields ``count`` pairs (label, run), the same ones for the same seed. ``run()`` returns
  None if the library held, and otherwise a sentence about what it did. ``folder`` is an empty folder to work in.

To reproduce a failing case, pass its seed and its label: ``python -m attacks NAME --seed 0 --only LABEL`` in ``tests``.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOOLS = ("mutate",)  # modules that are no attacks
Case = tuple[str, Callable[[], str | None]]


def names() -> list[str]:
    """All attacks, sorted."""
    found = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted(name for name in found - set(TOOLS) if not name.startswith("_"))


def module(name: str) -> Any:
    """The module of an attack."""
    return importlib.import_module(f"{__name__}.{name}")


def failures(name: str, seed: int, count: int, folder: Path, only: str = "") -> Iterator[tuple[str, str | None]]:
    """Run cases of an attack -> (label, None or what went wrong) of each."""
    for label, run in module(name).cases(seed, count, folder):
        if only in ("", label):
            yield label, run()
