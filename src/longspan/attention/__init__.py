"""One file, one mechanism: ``y, state = attention(x, state)``."""

import importlib
import pkgutil

from .base import REGISTRY, Attention
from .build import build
from .registry import list_mechanisms, mechanism_examples

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY", "Attention", "build", "list_mechanisms", "mechanism_examples"]
