"""longspan: efficient transformers behind one call, ``y, state = attention(x, state)``."""

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ._utils.version import VERSION

__version__ = VERSION

# The command ``longspan`` prints its help without torch, whose import takes seconds. The first argument is "-m" while
# Python looks for the module of ``python -m longspan``.
if TYPE_CHECKING or PurePath([*sys.argv, ""][0]).stem not in ("longspan", "-m"):
    from ._api import *  # noqa: F403 (its __all__ is that of the package)
    from ._api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        import importlib
        import importlib.util

        # A module that asks for another one, such as ops for patterns, must not import all of them first.
        if importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f".{name}", __name__)
        api = importlib.import_module("._api", __name__)
        # Without them while it is imported, when its modules ask for others here first.
        globals().update((public, getattr(api, public)) for public in getattr(api, "__all__", ()))
        if name == "__all__" or name not in globals():
            return getattr(api, name)
        return globals()[name]
