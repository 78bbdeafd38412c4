"""The version of the installed package."""

import importlib.metadata

try:
    VERSION = importlib.metadata.version("longspan")
except importlib.metadata.PackageNotFoundError:
    # A copy of the source tree that was never installed.
    VERSION = "unknown"
