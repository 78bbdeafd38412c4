"""A second device with values: its tensors are on the CPU, but no operation takes them together with those of the CPU.

``register`` adds the device ``elsewhere`` to the process. Mixing devices raises RuntimeError, as on a GPU.
"""

import json
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing

NAME = "elsewhere"


class Elsewhere(Tensor):
    """A tensor on the device ``elsewhere``; ``inner`` has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )

    def __init__(self, inner: Tensor):
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(indices(index), value)

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return tensor(data, **({"dtype": self.dtype, "device": self.device} | options))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def indices(index: Any) -> Any:
    """An index with tensors for its lists: torch cannot make tensors of a device that Python defines from lists."""
    if isinstance(index, tuple):
        return tuple(map(indices, index))
    return torch.tensor(index) if isinstance(index, list) else index


# Operations that take tensors of two devices on a GPU too.
TRANSFERS = ("aten::copy_", "aten::_to_copy")


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch on the values; its results are on the device that it names, or that of its operands."""
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    here = [t for t in given if not isinstance(t, Elsewhere)]
    indexed = func._schema.name.startswith(("aten::index", "aten::_index_put"))  # indices may be on the CPU
    if func._schema.name not in TRANSFERS and not indexed and any(t.dim() for t in here) and len(here) < len(given):
        raise RuntimeError(f"{func}: operands on {sorted({str(t.device) for t in given})}")
    named = kwargs.get("device")
    away = len(here) < len(given) if named is None else torch.device(named).type == NAME
    if named is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    inner_args, inner_kwargs = pytree.tree_map_only(Elsewhere, lambda t: t.inner, (args, kwargs))
    out = func(*inner_args, **inner_kwargs)
    if any(isinstance(t, Elsewhere) and t.shape != t.inner.shape for t in given):
        raise RuntimeError(f"{func} resized an operand; this device keeps sizes")
    if not away:
        return out
    out = pytree.tree_map_only(Tensor, Elsewhere, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


class Module(backend_registration._DummyBackendModule):
    """What torch asks a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_autocast_enabled(self) -> bool:
        return False


LIBRARY, FACTORIES = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")


def factory(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return run(func, args, kwargs)


def moved(make: Any) -> Any:
    """A function that makes tensors on the CPU first: torch fails to make these on a device that Python defines."""

    def made(*args: Any, device: Any = None, **options: Any) -> Tensor:
        found = make(*args, **options)
        return found if device is None else found.to(device)

    return made


tensor = moved(torch.tensor)


def register() -> None:
    """Add the device to this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    LIBRARY.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # torch remembers at its first use which functions make tensors: these, not the wrappers.
    with torch.device("meta"):
        torch.empty(0)
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, moved(getattr(torch, name)))
    # torch would make these empty and resize them.
    for name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m"):
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        FACTORIES.impl(name, partial(factory, func), "PrivateUse1")


def main(laws: str, specs: list[str]) -> None:
    """Print the results of laws on the device, a JSON object for each."""
    register()
    from longspan import testing
    from longspan.ops import isolated

    # Values can be read here, unlike those of other subclasses of tensors.
    isolated._readable = lambda segments: True
    for spec in specs:
        for law in laws.split(",") if laws else testing.applicable(spec):
            row = testing.check(law, spec, device=NAME)
            print(json.dumps({"spec": spec, "law": law, "status": row.status, "note": row.note}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
