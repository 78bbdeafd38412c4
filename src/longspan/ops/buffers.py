"""Reuse of memory and large pages: page faults on fresh memory can cost more than the computation."""

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

KEPT = 2**25 - 2**16  # bytes: the largest block that the C library can keep, less room for its bookkeeping
THRESHOLD, MAPPED = -3, 65536  # glibc's M_MMAP_THRESHOLD; bytes from which ``return_pages`` gives blocks back
LARGE_PAGE = 2**21  # bytes, on x86 and on arm64 with the usual small pages
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # known on Linux only
COLLAPSE = 25  # Linux's MADV_COLLAPSE, since 6.1, which Python does not name
GAP = 2**16  # bytes: tensors that are closer than this count as one block


@functools.cache
def reuse_pages() -> None:
    """Make the C library keep freed blocks of up to 32 MB for later tensors of this process.

    glibc maps new pages for large blocks, which the kernel must clear one by one. Once a block of a size has been
    freed, glibc keeps blocks of that size, as long as less than twice that size is free at the end of its heap. This
    function allocates and frees one such block without touching it. It has no effect with other C libraries.
    """
    torch.empty(KEPT, dtype=torch.uint8)


def return_pages() -> None:
    """Make the C library return freed blocks to the system immediately: the opposite of ``reuse_pages``.

    This costs time and saves memory. glibc keeps freed blocks in pieces that do not fit later tensors, so resident
    memory grows with the depth of a model (docs/results/lab.md). It has no effect with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(THRESHOLD, MAPPED)


def fresh_like(x: Tensor) -> Tensor:
    """Return ``torch.empty_like(x)``, on large pages if it is too large to come from freed memory.

    A page fault then maps 2 MB instead of 4 kB. This is advice to the system, which may ignore it. The tensor starts at
    a large page and has whole ones, so its storage has 4 MB more than its elements.
    """
    # Tensor subclasses and traced tensors may have no memory.
    plain = not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    if ADVICE is None or not plain or torch._C._len_torch_dispatch_stack() or x.numel() * x.element_size() <= KEPT:
        return torch.empty_like(x)
    size = x.element_size()
    memory = torch.empty(x.numel() + 2 * LARGE_PAGE // size, dtype=x.dtype)
    skipped = -memory.data_ptr() % LARGE_PAGE
    pages = -(-x.numel() * size // LARGE_PAGE)
    _madvise()(memory.data_ptr() + skipped, pages * LARGE_PAGE, ADVICE)
    strides = torch.empty_like(x, device="meta").stride()
    # Not a view, which autograd would refuse to change in place if a function returns it.
    return torch.empty(0, dtype=x.dtype).set_(memory.untyped_storage(), skipped // size, x.shape, strides)


def use_large_pages(tensors: Iterable[Tensor]) -> None:
    """Move the memory of tensors that are read again and again to large pages, as far as they fill them.

    This is advice to the system, which may ignore it. In a virtual machine, where a page is looked up in two tables,
    small ones can halve the speed of reading. No number changes, and no address.
    """
    plain = [t for t in tensors if type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu and t.is_contiguous()]
    if ADVICE is None or torch._C._len_torch_dispatch_stack():
        return
    ranges: list[tuple[int, int]] = []
    for begin, size in sorted((t.data_ptr(), t.nbytes) for t in plain):
        if ranges and begin - ranges[-1][1] < GAP:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], begin + size)
        else:
            ranges.append((begin, begin + size))
    for begin, end in ranges:
        begin = -(-begin // LARGE_PAGE) * LARGE_PAGE
        size = end // LARGE_PAGE * LARGE_PAGE - begin
        # Immediately, or in the background where the system does not know that.
        if size > 0 and _madvise()(begin, size, COLLAPSE):
            _madvise()(begin, size, ADVICE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


class Buffers:
    """Named tensors that are allocated once and reused by every span."""

    def __init__(self, like: Tensor):
        self.like = like
        self.blocks: dict[str, Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return a contiguous tensor of this shape, which shares memory with all others of this name."""
        key = name, shape
        if key not in self.views:
            size = math.prod(shape)
            if name not in self.blocks or self.blocks[name].numel() < size:
                self.blocks[name] = self.like.new_empty(size)
                self.views = {other: view for other, view in self.views.items() if other[0] != name}
            self.views[key] = self.blocks[name][:size].view(shape)
        return self.views[key]
