"""Mechanisms of other packages: found by their entry points, or by importing a module that is named.

A package says in its ``pyproject.toml`` which module registers its mechanisms::

    [project.entry-points."longspan.attentions"]
    my_package = "my_package"

Nothing of it is imported before a name is asked for that is not known, or for all names.
"""

import importlib
import os
import sys
import threading
import warnings

from .._utils.typecheck import format_value

GROUP = "longspan.attentions"
# What a message about an unknown mechanism adds.
HINT = f"; one of another package needs its entry point in the group {GROUP}, or on the command line --import MODULE"

_brought: list[str] = []
_lock = threading.RLock()
_loaded = False


def load() -> None:
    """Import what installed packages announce, once in a process; one that fails is a RuntimeWarning that names it."""
    global _loaded
    with _lock:
        if _loaded:
            return
        # First, since a module that is being imported may ask for names itself.
        _loaded = True
        from importlib.metadata import entry_points

        for entry in entry_points(group=GROUP):
            try:
                entry.load()
            # Whatever is wrong with one package, the others and our own mechanisms are there.
            except (Exception, SystemExit) as error:
                package = f" of the package {entry.dist.name}" if entry.dist else ""
                warnings.warn(
                    f"the entry point {entry.name} = {entry.value!r}{package} brings no mechanisms: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def bring(*modules: str) -> None:
    """Import these modules, whose classes register themselves; the current folder is looked at last.

    Raises ValueError where that fails: there is no such module, or it cannot be imported.
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
    """The modules that ``bring`` has imported."""
    return tuple(_brought)


def again() -> str:
    """Python that brings the same modules in a process of its own; "" where there are none."""
    return f"from longspan.attention import plugins; plugins.bring(*{_brought!r}); " if _brought else ""
