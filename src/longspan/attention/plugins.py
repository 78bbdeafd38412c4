"""Mechanisms of other packages, found by entry points or imported by module name.

A package declares in its ``pyproject.toml`` which module registers its mechanisms::

    [project.entry-points."longspan.attentions"]
    my_package = "my_package"

The module is imported on the first lookup of an unknown name, or of all names.
"""

import importlib
import os
import sys
import threading
import warnings

from .._utils.typecheck import format_value

GROUP = "longspan.attentions"
# The end of the message about an unknown mechanism.
HINT = f"; one of another package needs an entry point in the group {GROUP}, or --import MODULE on the command line"

_brought: list[str] = []
_lock = threading.RLock()
_loaded = False


def load() -> None:
    """Import the modules that installed packages declare, once per process.

    A module that raises does not stop the others.

    Warns:
        RuntimeWarning: For a module that raises; the message has its entry point and the error.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        # Set before the imports, since an imported module may look up names.
        _loaded = True
        from importlib.metadata import entry_points

        for entry in entry_points(group=GROUP):
            try:
                entry.load()
            # An error in one package must not hide the other mechanisms.
            except (Exception, SystemExit) as error:
                package = f" of the package {entry.dist.name}" if entry.dist else ""
                warnings.warn(
                    f"cannot load the entry point {entry.name} = {entry.value!r}{package}: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def bring(*modules: str) -> None:
    """Import modules, whose classes register themselves; the current directory is searched last.

    Args:
        modules: Names of modules, such as ``my_package.attention``.

    Raises:
        ValueError: For an invalid name, or a module that is missing or raises.
    """
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(
                f"--import {format_value(module)}: expected the name of a module, such as my_package.attention"
            )
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ValueError(f"--import {module}: {type(error).__name__}: {error}") from error
        if module not in _brought:
            _brought.append(module)


def brought() -> tuple[str, ...]:
    """Return the names of the modules that ``bring`` has imported."""
    return tuple(_brought)


def again() -> str:
    """Return Python code that imports the same modules in another process; "" without any."""
    return f"from longspan.attention import plugins; plugins.bring(*{_brought!r}); " if _brought else ""
