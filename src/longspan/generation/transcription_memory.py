"""The memory that a model needs to read a whole recording, compared with that of this machine."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._utils import model_memory
from ..models.transcriber import Transcriber

PROBE = 2048  # tokens of the longer of two short calls that are measured


class Peak(TorchDispatchMode):
    """Count the bytes of tensors that operations return: ``live`` now, ``top`` at the peak."""

    def __init__(self):
        super().__init__()
        self.live = self.top = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # Views of inputs, such as weights, take no memory.
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                if size and place not in given and place not in self.known:
                    self.known.add(place)
                    self.live += size
                    self.top = max(self.top, self.live)
                    weakref.finalize(storage, self._freed, place, size)
        return out

    def _freed(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.live -= size


def afford(model: Transcriber, frames: Tensor) -> None:
    """Raise ValueError if a call on frames (T,features) needs more memory than this machine has.

    Calls on the first ``PROBE`` tokens and on half of them are measured, and the polynomial ``a N + b N^2`` through
    both is extrapolated. If that is too much, twice as long calls decide, since some mechanisms switch to blocks beyond
    some length. Recordings of up to ``PROBE`` tokens and models on an accelerator are not measured.
    """
    stride = model.config.stride
    tokens = len(frames) // stride
    if tokens <= PROBE or model.head.weight.device.type != "cpu":
        return
    for longest in (PROBE, 2 * PROBE):
        if longest < tokens and (size := estimate(model, frames, longest)) <= model_memory.memory():
            return
    hint = "cut it into shorter ones, or use a causal model with --stream"
    if model.config.causal:
        hint = "use --stream (in Python: Listener), which reads short blocks"
    try:
        model_memory.check_fits_in_memory(size, f"a recording of {tokens} tokens")
    except ValueError as error:
        raise ValueError(f"{error}; {hint}") from None


def estimate(model: Transcriber, frames: Tensor, longest: int) -> int:
    """Extrapolate the bytes of a call on frames (T,features) from the first ``longest`` tokens and half of them."""
    stride, half = model.config.stride, longest // 2
    tokens = len(frames) // stride
    one, two = (_measured(model, frames[: stride * count]) for count in (half, longest))
    square = max(0.0, (two - 2 * one) / (2 * half**2))
    each = max(two / longest - square * longest, 0.0)
    return round(each * tokens + square * tokens**2)


def _measured(model: Transcriber, frames: Tensor) -> int:
    with torch.no_grad(), Peak() as peak:
        model(frames[None])
    return peak.top
