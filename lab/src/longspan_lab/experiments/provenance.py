"""Provenance of a measurement: commit, versions and machine."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

import longspan
from longspan._utils import machine as here

PACKAGES = ("longspan", "torch", "numpy", "lightning", "scikit-learn", "triton")
MISSING = "not recorded"


def commit(*folders: Path) -> str:
    """The commit of the checkout that the folders (default: longspan and longspan_lab) are tracked in, "+" behind it
    where files of theirs have changed since; "" outside a checkout and without git.
    """
    folders = folders or (Path(longspan.__file__).parent, Path(__file__).resolve().parents[1])
    # A package installed inside another checkout, and ignored there, is not at that commit.
    if not all(_git(folder, "ls-files", "--", ".") for folder in folders):
        return ""
    changed = any(_git(folder, "status", "--porcelain", "--", ".") for folder in folders)
    return _git(folders[0], "rev-parse", "HEAD") + "+" * changed


def _git(folder: Path, *words: str) -> str:
    """Output of git; "" if it fails or is missing."""
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
    """The machine: ``longspan._utils.machine`` without its load, and the GPU if there is one."""
    found = {fact: value for fact, value in here.machine().items() if fact != "load"}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def merged(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Merge the facts of two measurements: values that differ are listed.

    >>> merged({"torch": "2.6", "numpy": "2.4"}, {"torch": "2.7", "numpy": "2.4"})
    {'torch': '2.6, 2.7', 'numpy': '2.4'}
    """
    return {name: joined(before.get(name, MISSING), now.get(name, MISSING)) for name in [*before, *now]}


def joined(before: str, now: str) -> str:
    """Join two lists of values, each once; "" stands for none.

    >>> joined("a, b", "b"), joined("a", ""), joined("", "")
    ('a, b', 'a, none', '')
    """
    if before == now:
        return now
    return ", ".join(dict.fromkeys(one or "none" for one in [*before.split(", "), now]))
