"""Where longspan keeps what it can make or fetch again."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The environment variable LONGSPAN_CACHE, or the platform's folder for caches; it need not exist yet."""
    if chosen := os.environ.get("LONGSPAN_CACHE", ""):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "longspan"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "longspan" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longspan"
