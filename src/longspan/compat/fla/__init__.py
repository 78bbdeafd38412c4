"""flash-linear-attention on longspan's operations, on any device and in any precision: its functions and its models.

``load(folder)`` loads a published checkpoint; ``register()`` adds its model types to transformers.

After ``longspan.compat.fla.install()``, imports such as ``from fla.ops.gated_delta_rule import chunk_gated_delta_rule``
find them. Layouts and arguments are the original's: queries and keys (B,T,H,K), values (B,T,HV,V).
"""

from collections import defaultdict
from types import ModuleType
from typing import Any

from ..stand_in import StandIn, shims
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


def _modules() -> dict[str, ModuleType]:
    """Return our modules by the original's names."""
    places: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for family, names in FUNCTIONS.items():
        for name in names:
            file = next(file for file in FILES if name.startswith(file))
            for place in (f"{NAME}.ops.{family}.{file}", f"{NAME}.ops.{family}", f"{NAME}.ops"):
                places[place][name] = getattr(ops, name)
    return shims(places, "flash-linear-attention's names on longspan's operations.", "docs/how-to/from-fla.md")


_stand_in = StandIn(NAME, _modules)
install, uninstall = _stand_in.install, _stand_in.uninstall
