"""Memory of weights before they are allocated, compared with the memory of the machine."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Returned if the system gives no figure; more than any machine that runs this has.
_UNKNOWN = 1 << 40
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def memory() -> int:
    """Return the bytes of memory of this machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN


def check_fits_in_memory(size: int, what: str) -> None:
    """Raise ValueError if this machine has less than ``size`` bytes of memory; ``what`` names their use."""
    if size > (has := memory()):
        raise ValueError(f"{what} would take {_read(size)} of memory; this machine has {_read(has)}")


class _Unfilled(TorchFunctionMode):
    """Skip random initialization of tensors on the meta device, which have no values.

    PyTorch would import its compiler to fill them, which takes a second.
    """

    FILLS = frozenset({Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_})

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None):
        if func in self.FILLS:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


def shapes(make: Callable[[], nn.Module]) -> nn.Module:
    """Call ``make`` on the meta device: the module's weights have shapes and need no memory.

    Raises ValueError for sizes that no tensor can have.
    """
    try:
        with torch.device("meta"), _Unfilled():
            return make()
    # A size beyond 64 bits is a TypeError in torch.
    except (RuntimeError, TypeError) as error:
        if isinstance(error, TypeError) and "Overflow" not in str(error):
            raise
        raise ValueError(f"no tensor can have the sizes of its weights: {str(error).splitlines()[0]}") from error


def nbytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights and buffers."""
    return sum(t.numel() * t.element_size() for t in itertools.chain(module.parameters(), module.buffers()))


def allocates_on_cpu() -> bool:
    """Whether new tensors are on the CPU, not on the meta device or an accelerator."""
    return torch.get_default_device().type == "cpu"


def _read(size: int) -> str:
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size / 1024**power:.3g} {_UNITS[power]}"
