"""One file, one mechanism: ``y, state = attention(x, state)``."""

import importlib
import pkgutil

from .base import REGISTRY, Attention, build, examples, names
from .state import clone, detach, load_state, nbytes, save_state, select

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "REGISTRY", "Attention", "build", "clone", "detach", "examples", "load_state", "names", "nbytes", "save_state",
    "select",
]  # fmt: skip
