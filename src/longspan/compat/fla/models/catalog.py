"""The families that longspan supports, found by their modules."""

import functools
import importlib
import pkgutil
from typing import Any

from ...._utils.optional_deps import need


@functools.cache
def supported() -> dict[str, Any]:
    """Return the supported families by model type."""
    need("longspan.compat.fla.load", "transformers")
    from . import families as modules

    found = {}
    for module in pkgutil.iter_modules(modules.__path__):
        for family in importlib.import_module(f"{modules.__name__}.{module.name}").FAMILIES:
            found[family.model_type] = family
    return found
