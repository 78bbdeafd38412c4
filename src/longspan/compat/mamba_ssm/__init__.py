"""mamba_ssm on longspan's operations, on any device and in any precision: its functions, layers and blocks.

After ``longspan.compat.mamba_ssm.install()``, imports such as ``from mamba_ssm import Mamba2`` find them. Names,
layouts and arguments are those of mamba_ssm 2.3, and the layers load its checkpoints.
"""

from types import ModuleType
from typing import Any

from ..stand_in import StandIn, shims
from . import ops
from .blocks import Block, layer_norm_fn, rms_norm_fn
from .blocks import RMSNorm as AddedRMSNorm
from .modules import Mamba, Mamba2
from .norms import RMSNorm, rmsnorm_fn

__all__ = ["install", "uninstall"]

NAME, VERSION = "mamba_ssm", "2.3.2"
_NORMS = {"RMSNorm": AddedRMSNorm, "layer_norm_fn": layer_norm_fn, "rms_norm_fn": rms_norm_fn}
_SCANS = {name: getattr(ops, name) for name in ("mamba_inner_fn", "selective_scan_fn")}
# Modules of the original below its package, with the names that other code imports from them.
PLACES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION, "Mamba": Mamba, "Mamba2": Mamba2, **_SCANS},
    ".modules.mamba2": {"Mamba2": Mamba2, "RMSNormGated": RMSNorm},
    ".modules.block": {"Block": Block},
    ".modules.mamba_simple": {"Mamba": Mamba, "Block": Block},
    ".ops.selective_scan_interface": {"selective_scan_ref": ops.selective_scan_fn, **_SCANS},
    ".ops.triton.layer_norm": _NORMS,
    ".ops.triton.layernorm": _NORMS,
    ".ops.triton.layernorm_gated": {"RMSNorm": RMSNorm, "rmsnorm_fn": rmsnorm_fn},
    ".ops.triton.selective_state_update": {"selective_state_update": ops.selective_state_update},
    ".ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": ops.mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": ops.mamba_split_conv1d_scan_combined,
    },
}


def _modules() -> dict[str, ModuleType]:
    """Return our modules by the original's names."""
    places = {NAME + place: names for place, names in PLACES.items()}
    return shims(places, "mamba_ssm's names on longspan's operations.", "docs/how-to/from-mamba-ssm.md")


_stand_in = StandIn(NAME, _modules)
install, uninstall = _stand_in.install, _stand_in.uninstall
