"""flash-linear-attention on longspan's operations, on any device and in any precision: its functions and its models.

``load(folder)`` loads a published checkpoint; ``register()`` adds its model types to transformers.

After ``longspan.compat.fla.install()``, imports such as ``from fla.ops.gated_delta_rule import chunk_gated_delta_rule``
find them. Layouts and arguments are the original's: queries and keys (B,T,H,K), values (B,T,HV,V).
"""

from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..stand_in import StandIn
from . import ops
from .models import load, register, save_pth

__all__ = ["install", "load", "register", "save_pth", "uninstall"]

NAME = "fla"
# Modules of the original below fla.ops with their functions. Each function is also in fla.ops.
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
# Files of the original: chunk_gla is also in fla.ops.gla.chunk.
FILES = ("fused_chunk", "fused_recurrent", "chunk")


class Shim(ModuleType):
    """A module with the original's name; a missing attribute raises an AttributeError that lists the present ones."""

    def __init__(self, name: str, document: str):
        super().__init__(name, document)
        # importlib.util.find_spec finds the package by these.
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

    It applies to this process, until ``uninstall()``. A second call changes nothing. Call it before the first import of
    fla: names that were imported earlier keep their values.

    Args:
        replace: replace the real flash-linear-attention if it is installed or imported. Its files do not change.

    Raises:
        ValueError: the real flash-linear-attention is installed or imported, and ``replace`` is False.
    """
    _names.install(replace)


def uninstall() -> None:
    """Undo ``install()``, so that imports find the real package, if any. Without ``install()`` nothing changes."""
    _names.uninstall()


def _modules() -> dict[str, ModuleType]:
    """Return our modules by the original's names."""
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


_names = StandIn(NAME, _modules)
