"""A fake accelerator on a CPU: what a GPU would be asked to do, without one.

``Accelerator`` registers a device ``fakegpu`` whose tensors have shapes and no data, and which say ``is_cuda``, so the
dispatch takes the way of a GPU. Operations that mix devices raise. ``Count`` counts what a GPU pays for: kernel
launches, waits for the device (its data is needed on the CPU) and uploads (data of the CPU is needed on the device),
each with its line in longspan. Kernels of C++ and Triton refuse tensors without data, so the forms in PyTorch run.

The device is registered for a whole process, so tests start one: ``measure(specs)`` does, and

    python tests/gpu/fake.py linear "local(window=5)"

prints the counts of each mechanism as JSON.
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "fakegpu"
SOURCE = str(Path(__file__).resolve().parents[2] / "src" / "longspan") + os.sep
TORCH = (2, 13)  # the first version whose fake device also runs backward
BATCH, TOKENS, DIM, HEADS = 2, 29, 24, 3
EVENTS = ("forward", "backward", "mask", "segments", "prompt", "step", "donated")

# Operations that launch nothing: they only describe memory, or allocate it.
FREE = frozenset(
    "view _unsafe_view expand transpose permute t slice select unsqueeze squeeze as_strided detach alias split "
    "split_with_sizes unbind unfold diagonal narrow _reshape_alias reshape lift_fresh flatten unflatten empty "
    "empty_like new_empty empty_strided new_empty_strided resolve_neg resolve_conj".split()
)


def available() -> bool:
    """Return whether this version of torch has what the fake device needs."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= TORCH


def line() -> str:
    """Return the innermost line of longspan on the stack, as ``ops/rows.py:90``; "?" outside of longspan."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            return f"{frame.f_code.co_filename.removeprefix(SOURCE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Count(TorchDispatchMode):
    """Count launches, waits and uploads of the fake device; operations whose size depends on data get a full size.

    Attributes:
        operations: launches by the name of the operation.
        syncs: a line of longspan for each wait of the CPU for the device.
        uploads: a line of longspan for each copy from the CPU to the device.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.operations: collections.Counter[str] = collections.Counter()
        self.syncs: list[str] = []
        self.uploads: list[str] = []

    @property
    def launches(self) -> int:
        return self.operations.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name == "device":
            return func(*args, **kwargs)
        if func.namespace == "longspan":
            # What an operator of the library launches, not its one name.
            with self:
                return OPDEFS[func._schema.name]._backend_fns[None](*args, **kwargs)
        with self:
            # Below autograd, operations may come in one piece that consist of others.
            if (whole := func.decompose(*args, **kwargs)) is not NotImplemented:
                return whole
        given = {x.device.type for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if DEVICE in given:
            if name == "_local_scalar_dense":
                self.syncs.append(line())
                return self.value(args[0].dtype)
            if name == "nonzero":
                return self._nonzero(args[0])
            if name.startswith(("_unique", "unique")):
                self.syncs.append(line())
                self.operations[name] += 1
                one = args[0].flatten()[:1]
                return one, torch.empty(args[0].shape, dtype=torch.int64, device=DEVICE), torch.empty_like(one)
            if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
                args = (args[0], self._places(args[1]), *args[2:])
        where = kwargs.get("device")
        if DEVICE not in given and (where is None or torch.device(where).type != DEVICE):
            # Tensors of the CPU have data: plans and tables are made there.
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self._fake, (args, kwargs))
        out = func(*args, **kwargs)
        found = given | {x.device.type for x in pytree.tree_leaves(out) if isinstance(x, Tensor)}
        if DEVICE in found and name.rstrip("_") not in FREE:
            self.operations[name] += 1
            if name.startswith("index") and "cpu" in given:
                self.uploads.append(line())
            if name in ("_to_copy", "copy_") and "cpu" in found:
                (self.uploads if "cpu" in given else self.syncs).append(line())
        return out

    def _fake(self, x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else self.mode.from_tensor(x)

    @staticmethod
    def value(dtype: torch.dtype) -> bool | int | float:
        """Return what a number that is read from the device is taken to be."""
        return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0

    def _nonzero(self, x: Tensor) -> Tensor:
        self.syncs.append(line())
        self.operations["nonzero"] += 1
        return torch.empty(x.numel(), x.dim(), dtype=torch.int64, device=x.device)

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replace boolean masks among indices by the positions that they keep: all."""
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and index.device.type == DEVICE:
                places.extend(self._nonzero(index).unbind(1))
            else:
                places.append(index)
        return places


@contextlib.contextmanager
def accelerator() -> Iterator[Count]:
    """Register the device and run the block on it; tensors made in the block are fake. Once per process."""
    from torch.utils import backend_registration

    class Module(backend_registration._DummyBackendModule):
        """What ``torch.fakegpu`` must have for autocast and random numbers."""

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

        def is_autocast_enabled(self) -> bool:
            return False

        def get_autocast_dtype(self) -> torch.dtype:
            return torch.bfloat16

        def current_device(self) -> int:
            return 0

        def device_count(self) -> int:
            return 1

        def is_initialized(self) -> bool:
            return True

        def is_available(self) -> bool:
            return True

        def _is_in_bad_fork(self) -> bool:
            return False

        def manual_seed_all(self, seed: int) -> None:
            pass

        def get_rng_state(self, device: Any = None) -> Tensor:
            return torch.zeros(8, dtype=torch.uint8)

        def set_rng_state(self, state: Tensor, device: Any = None) -> None:
            pass

    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())
    FakeTensor.is_cuda = property(lambda self: self.device.type in ("cuda", DEVICE))
    count = Count(FakeTensorMode())

    # Values of Python do not pass through the dispatcher on their way to a device.
    def uploading(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
            if device is None or torch.device(device).type != DEVICE or isinstance(data, Tensor):
                return make(data, *args, **options, **({} if device is None else {"device": device}))
            return make(data, *args, **options).to(device)

        return tensor

    # Lists are read for the lengths of sequences, which are not 0, and for the counters of states, which start at 0.
    def tolist(x: Tensor) -> Any:
        count.syncs.append(line())
        return nested(x.shape, 0 if line().startswith("states/counters") else 1)

    def nested(shape: Sequence[int], value: int) -> Any:
        return [nested(shape[1:], value)] * shape[0] if shape else value

    def new_tensor(x: Tensor, data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or x.dtype, device=device or x.device)

    torch.tensor, torch.as_tensor = uploading(torch.tensor), uploading(torch.as_tensor)
    FakeTensor.tolist, FakeTensor.new_tensor = tolist, new_tensor
    with count.mode, count:
        yield count


def moved(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Move parameters and buffers to the fake device; a tensor that is neither stays on the CPU, as with ``to``."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, x in list(table.items()):
                if x is not None:
                    with torch.no_grad():
                        fake = FakeTensor(mode, x.detach().to("meta"), torch.device(DEVICE))
                    table[name] = fake.requires_grad_(x.requires_grad)
    return module


def counted(count: Count, run: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """What a call costs, and its result; the error and its line if it fails."""
    count.operations, count.syncs, count.uploads = collections.Counter(), [], []
    error, result = "", None
    try:
        result = run()
    except Exception as problem:
        frames = [f for f in traceback.extract_tb(problem.__traceback__) if f.filename.startswith(SOURCE)]
        at = f"{frames[-1].filename.removeprefix(SOURCE)}:{frames[-1].lineno}" if frames else "?"
        error = f"{at}: {type(problem).__name__}: {str(problem).strip().splitlines()[0][:200]}"
    costs = {"launches": count.launches, "syncs": count.syncs, "uploads": count.uploads, "error": error}
    return costs, result


def costs(count: Count, text: str) -> dict[str, dict[str, Any]]:
    """Count each event of a mechanism that it has: forward, backward, mask, segments, prompt, step, donated step."""
    import longspan
    from longspan.attention.base import REGISTRY

    found: dict[str, dict[str, Any]] = {}
    causal = "causal" in REGISTRY[text.partition("(")[0]].directions
    built = longspan.build(text, dim=DIM, heads=HEADS, causal=causal)
    module: Any = moved(built, count.mode)
    x = torch.empty(BATCH, TOKENS, DIM, device=DEVICE)
    carry = {"carry": module.init_carry(x, None)} if module.has_layer_carry else {}

    def note(event: str, run: Callable[[], Any]) -> Any:
        found[event], result = counted(count, run)
        return result

    # The first call makes tables that later ones read.
    with torch.no_grad():
        counted(count, lambda: module(x, **carry))
    made = note("forward", lambda: module(x, **carry))
    if made is not None:
        note("backward", lambda: made[0].sum().backward())
    with torch.no_grad():
        if "mask" in module.supported_args:
            note("mask", lambda: module(x, mask=torch.ones(BATCH, TOKENS, dtype=torch.bool, device=DEVICE), **carry))
        if "segments" in module.supported_args:
            segments = torch.zeros(BATCH, TOKENS, dtype=torch.int64, device=DEVICE)
            note("segments", lambda: module(x, segments=segments, **carry))
        if causal:
            after = note("prompt", lambda: module(x, module.init_state(BATCH), **carry))
            if after is not None:
                token = torch.empty(BATCH, 1, DIM, device=DEVICE)
                one = {"carry": module.init_carry(token, None)} if carry else {}
                # So does the first step.
                counted(count, lambda: module(token, after[1], **one))
                note("step", lambda: module(token, after[1], **one))
                note("donated", lambda: module(token, after[1], donate=True, **one))
    return found


def measure(specs: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return ``costs`` of each spec, from a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *specs],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main() -> None:
    import longspan

    specs = sys.argv[1:] or [longspan.mechanism_examples(name)[0] for name in longspan.list_mechanisms()]
    with accelerator() as count:
        found = {text: costs(count, text) for text in specs}
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(SOURCE).parent))
    main()
