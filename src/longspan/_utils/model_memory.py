"""Memory of weights before they are allocated, compared with the memory of the machine."""

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
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


class Unfilled(TorchFunctionMode):
    """Leaves new weights without numbers: on the meta device, where they have none, or where a file's will follow.

    On the meta device PyTorch would import its compiler for these functions, which takes two seconds and 150 MB.

    Args:
        everywhere: Skip random initialization on all devices. Memory that is not filled is not taken yet.
    """

    FILLS = frozenset({"normal_", "uniform_", "kaiming_uniform_"})
    DRAWS = frozenset({"rand", "randn"})
    ELEMENTWISE = frozenset(
        {f"__{name}__" for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "rpow", "neg")}
        | {"add", "sub", "mul", "div", "pow", "neg", "sign", "exp", "expm1", "log", "relu", "clamp", "roll"}
        | {"layer_norm", "normalize"}
    )

    def __init__(self, everywhere: bool = False):
        super().__init__()
        self.everywhere = everywhere

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None):
        """Return what ``func`` returns, perhaps without its numbers."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in self.FILLS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and (tensor.is_meta or self.everywhere):
                return tensor
        elif self._on_meta(kwargs) and (shape := self._shape(name, args, kwargs)) is not None:
            given = [one for one in args if isinstance(one, Tensor)]
            dtypes = [kwargs["dtype"]] if kwargs.get("dtype") else [one.dtype for one in given]
            return torch.empty(shape, dtype=functools.reduce(torch.promote_types, dtypes) if dtypes else None)
        return func(*args, **kwargs)

    def _on_meta(self, options: dict[str, Any]) -> bool:
        """Return whether a function makes tensors on the meta device, unless it reads others."""
        return torch.get_default_device().type == torch.device(options.get("device") or "meta").type == "meta"

    def _shape(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Sequence[int] | None:
        """Return the shape of what a function returns on the meta device; None if it is not known here."""
        given = [one for one in args if isinstance(one, Tensor)]
        if name in self.DRAWS:
            return torch.Size(args[0] if isinstance(args[0], Sequence) else args)
        if name == "arange" and not kwargs and len(args) == 2:
            return (math.ceil(args[1] - args[0]),)
        if name == "eye":
            return args[0], args[-1]
        if name in ("stack", "cat") and all(one.is_floating_point() for one in args[0]):
            first = args[0][0].shape
            if name == "stack" and len(args) == 1:
                return len(args[0]), *first
            if name == "cat" and args[1:] == (-1,):
                return *first[:-1], sum(one.shape[-1] for one in args[0])
        if not given or not all(one.is_meta and one.is_floating_point() for one in given):
            return None
        if name == "norm" and kwargs.get("dim") == -1 and not kwargs.get("keepdim"):
            return given[0].shape[:-1]
        if name not in self.ELEMENTWISE:
            return None
        sizes = itertools.zip_longest(*(one.shape[::-1] for one in given), fillvalue=1)
        return [next((size for size in same if size != 1), 1) for same in sizes][::-1]


def shapes(make: Callable[[], nn.Module]) -> nn.Module:
    """Call ``make`` on the meta device: the module's weights have shapes and need no memory.

    Raises ValueError for sizes that no tensor can have.
    """
    try:
        with torch.device("meta"), Unfilled():
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
