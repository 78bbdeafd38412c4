"""Where figures come from: the commit, the versions and the machine of a measurement, so that it can be had again."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from ..bench import guard

PACKAGES = ("longspan", "torch", "numpy", "lightning", "scikit-learn", "triton")
MISSING = "not recorded"


def commit(folder: Path | None = None) -> str:
    """The commit of the checkout that ``folder`` (default: this package) is tracked in, "+" behind it where files of
    the folder have changed since; "" outside a checkout and without git.
    """
    folder = folder or Path(__file__).resolve().parents[1]
    # A package installed inside somebody else's checkout, ignored there, is not at that commit.
    if not _git(folder, "ls-files", "--", "."):
        return ""
    return _git(folder, "rev-parse", "HEAD") + ("+" if _git(folder, "status", "--porcelain", "--", ".") else "")


def _git(folder: Path, *words: str) -> str:
    """What git prints; "" where it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """Name -> version of Python and of what of PACKAGES, and of ``more``, is installed."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, object]:
    """What is measured on: ``guard.machine()`` without its load, which passes, and the GPU where there is one."""
    found = {fact: value for fact, value in guard.machine().items() if fact != "load"}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def merged(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What took part in two measurements: values that differ stand side by side.

    >>> merged({"torch": "2.6", "numpy": "2.4"}, {"torch": "2.7", "numpy": "2.4"})
    {'torch': '2.6, 2.7', 'numpy': '2.4'}
    """
    return {name: joined(before.get(name, MISSING), now.get(name, MISSING)) for name in [*before, *now]}


def joined(before: str, now: str) -> str:
    """Two values side by side, each once; "" stands for none.

    >>> joined("a, b", "b"), joined("a", ""), joined("", "")
    ('a, b', 'a, none', '')
    """
    if before == now:
        return now
    return ", ".join(dict.fromkeys(one or "none" for one in [*before.split(", "), now]))
