"""Where longspan keeps what it can make or fetch again."""

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The environment variable LONGSPAN_CACHE, or the platform's folder for caches; it need not exist yet.

    Without a home, as for a user that the system does not know, it is ``longspan-UID`` in the folder for temporary
    files. Raises ValueError for a LONGSPAN_CACHE that begins with the home of an unknown user, and where there is not
    even a folder for temporary files.
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
        return _without_home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "longspan"
    return home / "longspan" / "Cache" if sys.platform == "win32" else home / ".cache" / "longspan"


def expanded(path: str | os.PathLike) -> Path:
    """The path with the home of a user in the place of ``~`` or ``~name``. Raises ValueError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        name = Path(path).parts[0]
        who = "this user, and HOME is not set" if name == "~" else f"a user {name[1:]!r}"
        raise ValueError(f"{str(path)!r} has no meaning: the system knows no home of {who}") from error


def _without_home() -> Path:
    name = f"longspan-{os.getuid()}" if hasattr(os, "getuid") else "longspan"
    try:
        folder = Path(tempfile.gettempdir()) / name
    except OSError as error:
        raise ValueError("there is no home and no folder for temporary files; set LONGSPAN_CACHE") from error
    # Anybody may have made a folder of this name there.
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
            raise ValueError(f"{folder} belongs to somebody else; set LONGSPAN_CACHE to a folder of your own")
    return folder
