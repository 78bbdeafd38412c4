"""One file, one mechanism: ``y, state = attention(x, state)``."""

import importlib
import pkgutil

from ..states.utils import clone, detach, load_state, nbytes, save_state, select
from .base import REGISTRY, Attention
from .build import build
from .registry import examples, names

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "REGISTRY", "Attention", "build", "clone", "detach", "examples", "load_state", "names", "nbytes", "save_state",
    "select",
]  # fmt: skip
