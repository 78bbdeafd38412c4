"""The cache folder, for compiled kernels and downloads."""

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return LONGSPAN_CACHE, or the platform's cache folder. It may not exist yet.

    Without a home folder it is ``temporary_folder()``.

    Raises ValueError if LONGSPAN_CACHE begins with ``~USER`` and that user does not exist, or if no folder for
    temporary files exists.
    """
    if chosen := os.environ.get("LONGSPAN_CACHE", ""):
        try:
            return expanded(chosen)
        except ValueError as error:
            raise ValueError(f"LONGSPAN_CACHE: {error}") from error
    if sys.platform == "win32" and (chosen := os.environ.get("LOCALAPPDATA", "")):
        return Path(chosen) / "longspan" / "Cache"
    if sys.platform not in ("darwin", "win32") and (chosen := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(chosen) / "longspan"
    try:
        home = Path.home()
    except RuntimeError:
        return temporary_folder()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "longspan"
    return home / "longspan" / "Cache" if sys.platform == "win32" else home / ".cache" / "longspan"


def expanded(path: str | os.PathLike) -> Path:
    """Expand ``~`` or ``~name`` in a path. Raises ValueError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        name = Path(path).parts[0]
        who = "this user, and HOME is not set" if name == "~" else f"a user {name[1:]!r}"
        raise ValueError(f"{str(path)!r} has no meaning: the system knows no home of {who}") from error


def temporary_folder() -> Path:
    """Return the folder that replaces the cache folder where that cannot be used: ``longspan-UID`` for temporary files.

    Raises ValueError if it belongs to another user, or if no folder for temporary files exists.
    """
    name = f"longspan-{os.getuid()}" if hasattr(os, "getuid") else "longspan"
    try:
        folder = Path(tempfile.gettempdir()) / name
    except OSError as error:
        raise ValueError("there is no home and no folder for temporary files; set LONGSPAN_CACHE") from error
    # Another user may have made a folder of this name.
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
            raise ValueError(f"{folder} belongs to another user; set LONGSPAN_CACHE to a folder that you own")
    return folder
