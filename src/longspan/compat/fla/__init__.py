"""The functional names of flash-linear-attention on longspan's operations, for code that was written for a GPU.

``longspan.compat.fla.install()`` makes ``from fla.ops.gated_delta_rule import chunk_gated_delta_rule`` and its like
find them, on any device and in any precision. Layouts and arguments are the original's: queries, keys (B,T,H,K) and
values (B,T,HV,V), sequence before heads.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import ops

NAME = "fla"
# Module of the original below fla.ops, and its functions; each is also in fla.ops itself.
FUNCTIONS = {
    "delta_rule": ("chunk_delta_rule", "fused_recurrent_delta_rule"),
    "gated_delta_rule": (
        "chunk_gated_delta_rule",
        "chunk_gdn",
        "fused_recurrent_gated_delta_rule",
        "fused_recurrent_gdn",
    ),
    "gla": ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"),
    "kda": ("chunk_kda", "fused_recurrent_kda"),
    "linear_attn": ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"),
    "retention": ("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention"),
    "simple_gla": ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"),
}
# Where the original has them: chunk_gla also in fla.ops.gla.chunk.
FILES = ("fused_chunk", "fused_recurrent", "chunk")

# What install() put under the name, and what had been there.
_installed: dict[str, ModuleType] = {}
_displaced: dict[str, ModuleType] = {}


class Shim(ModuleType):
    """A module of the original's name; what it does not have is an AttributeError that says what there is."""

    def __init__(self, name: str, document: str):
        super().__init__(name, document)
        # Whoever looks for the package, without importing it, finds it.
        self.__spec__, self.__path__ = ModuleSpec(name, None, is_package=True), []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = ", ".join(sorted(one for one in vars(self) if not one.startswith("_"))) or "nothing"
        raise AttributeError(
            f"longspan's {self.__name__} has no {name!r}; it has {known}; "
            "docs/how-to/from-fla.md lists what is not carried over"
        )


def install(*, replace: bool = False) -> None:
    """Make ``import fla``, and the modules of ``FUNCTIONS`` below ``fla.ops``, find longspan's operations.

    Holds for this process, until ``uninstall()``; a second call changes nothing. Call it before whatever imports fla:
    names that were imported earlier stay what they were.

    Raises ValueError where the real flash-linear-attention is installed or imported, unless ``replace=True``.
    """
    if _installed:
        return
    real = {name: module for name, module in sys.modules.items() if name == NAME or name.startswith(f"{NAME}.")}
    if not replace and (real or importlib.util.find_spec(NAME) is not None):
        how = "already imported" if real else "installed here"
        raise ValueError(
            f"{NAME} is {how}; install(replace=True) takes its place in this process, and leaves its files alone"
        )
    for name in real:
        _displaced[name] = sys.modules.pop(name)
    _installed.update(_modules())
    sys.modules.update(_installed)


def uninstall() -> None:
    """Undo ``install()``: the real package, if there is one, is found again. Without ``install()`` nothing changes."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    sys.modules.update(_displaced)
    _installed.clear()
    _displaced.clear()


def _modules() -> dict[str, ModuleType]:
    """Our modules by the original's names."""
    found: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        if name not in found:
            found[name] = Shim(name, "flash-linear-attention's names on longspan's operations.")
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(module(parent), child, found[name])
        return found[name]

    for family, names in FUNCTIONS.items():
        for name in names:
            file = next(file for file in FILES if name.startswith(file))
            for place in (f"{NAME}.ops.{family}.{file}", f"{NAME}.ops.{family}", f"{NAME}.ops"):
                setattr(module(place), name, getattr(ops, name))
    return found
