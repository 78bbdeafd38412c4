"""Modules of ours under the names of another library, in this process."""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


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

    def install(self, replace: bool) -> None:
        """Put the modules there; a second call changes nothing.

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
        """Remove the modules, and put back those that they replaced."""
        for name, module in self._installed.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self._displaced)
        self._installed.clear()
        self._displaced.clear()
