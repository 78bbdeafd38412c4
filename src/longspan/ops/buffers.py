"""Memory that is used again, or fetched in large pages: fresh pages cost a CPU more than many an operation."""

import contextlib
import ctypes
import functools
import math
import mmap

import torch
from torch import Tensor

KEPT = 2**25 - 2**16  # bytes: the largest block that the C library can be made to keep, room for its own notes left
THRESHOLD, MAPPED = -3, 65536  # glibc's M_MMAP_THRESHOLD; bytes from which ``return_pages`` gives blocks back
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # known on Linux only


@functools.cache
def reuse_pages() -> None:
    """Let the C library keep freed blocks of up to 32 MB for the next tensor, in this process, from now on.

    glibc serves large blocks by new pages, which the kernel must clear one by one, until a block of that size has been
    freed once; then it keeps such blocks, while less than twice that size lies free at the end of its heap. So one is
    taken and freed, untouched. Elsewhere this does nothing.
    """
    torch.empty(KEPT, dtype=torch.uint8)


def return_pages() -> None:
    """Have the C library give freed blocks back to the system at once, in this process, from now on: the opposite.

    It costs time, and is for what must fit: glibc keeps freed blocks in pieces that others do not fit, so that resident
    memory grows with the depth of a model even where nothing is kept (docs/results/lab.md). Does nothing elsewhere.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(THRESHOLD, MAPPED)


def fresh_like(x: Tensor) -> Tensor:
    """``torch.empty_like(x)``, whose pages will be large ones where it is too large to come from freed memory.

    A page fault then brings 2 MB instead of 4 kB. That is only advice: where the system gives none, nothing changes.
    """
    out = torch.empty_like(x)
    # Tensors of other classes, and those that a compiler traces, may have no memory.
    real = not torch.compiler.is_compiling() and type(out) is Tensor and out.device.type == "cpu"
    if ADVICE is not None and real and out.nbytes > KEPT:
        start = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (out.data_ptr() + out.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise()(start, end - start, ADVICE)
    return out


@functools.cache
def _madvise():
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


class Buffers:
    """Tensors by name, made once and used again by every span: fresh pages cost more than what is computed on them."""

    def __init__(self, like: Tensor):
        self.like = like
        self.blocks: dict[str, Tensor] = {}
        self.views: dict[tuple, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor of this shape; it shares its memory with all others of this name."""
        key = name, shape
        if key not in self.views:
            size = math.prod(shape)
            if name not in self.blocks or self.blocks[name].numel() < size:
                self.blocks[name] = self.like.new_empty(size)
                self.views = {other: view for other, view in self.views.items() if other[0] != name}
            self.views[key] = self.blocks[name][:size].view(shape)
        return self.views[key]
