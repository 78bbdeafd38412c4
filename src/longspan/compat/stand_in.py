"""Modules of ours under the names of another library, in this process."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Shim(ModuleType):
    """A module with the original's name; a missing attribute raises an AttributeError that lists the present ones.

    Args:
        name: the original's name.
        document: the docstring.
        page: the page of the docs that lists what is not carried over.
    """

    def __init__(self, name: str, document: str, page: str):
        super().__init__(name, document)
        self._page = page
        # importlib.util.find_spec finds the package by these.
        self.__spec__, self.__path__ = ModuleSpec(name, None, is_package=True), []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = ", ".join(sorted(one for one in vars(self) if not one.startswith("_"))) or "nothing"
        raise AttributeError(
            f"longspan's {self.__name__} has no {name!r}; it has {known}; {self._page} lists what is not carried over"
        )


def shims(places: Mapping[str, Mapping[str, Any]], document: str, page: str) -> dict[str, ModuleType]:
    """Return modules by the original's names, with the packages around them.

    Args:
        places: by the name of each module, its attributes by their names.
        document: the docstring of all modules.
        page: the page of the docs that lists what is not carried over.
    """
    found: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        if name not in found:
            found[name] = Shim(name, document, page)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(module(parent), child, found[name])
        return found[name]

    for place, attributes in places.items():
        for name, value in attributes.items():
            setattr(module(place), name, value)
    return found


class StandIn:
    """Put modules under a library's names in ``sys.modules``, and remove them again.

    Args:
        name: the library.
        modules: returns our modules by the original's names.
    """

    def __init__(self, name: str, modules: Callable[[], dict[str, ModuleType]]):
        self.name, self.modules = name, modules
        self._installed: dict[str, ModuleType] = {}
        self._displaced: dict[str, ModuleType] = {}

    def install(self, *, replace: bool = False) -> None:
        """Make imports of the library find longspan's modules, in this process, until ``uninstall()``.

        A second call changes nothing. Call it before the first import of the library, and of transformers' models:
        names that were imported earlier keep their values.

        Args:
            replace: replace the real library if it is installed or imported. Its files do not change.

        Raises:
            ValueError: the real library is installed or imported, and ``replace`` is False.
        """
        if self._installed:
            return
        name = self.name
        real = {one: module for one, module in sys.modules.items() if one == name or one.startswith(f"{name}.")}
        if not replace and (real or importlib.util.find_spec(name) is not None):
            how = "already imported" if real else "installed here"
            raise ValueError(
                f"{name} is {how}; install(replace=True) replaces it in this process and does not change its files"
            )
        found = self.modules()
        for one in real:
            self._displaced[one] = sys.modules.pop(one)
        self._installed.update(found)
        sys.modules.update(found)

    def uninstall(self) -> None:
        """Undo ``install()``, so that imports find the real library, if any. Without ``install()`` nothing changes."""
        for name, module in self._installed.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self._displaced)
        self._installed.clear()
        self._displaced.clear()
