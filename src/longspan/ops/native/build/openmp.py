"""One pool of threads for torch and the kernels, and none in a forked child."""

import contextlib
import ctypes
import functools
import os
import sys
from pathlib import Path

import torch

_OWNER = os.getpid()


class _Place(ctypes.Structure):
    """C's Dl_info: the origin of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@functools.cache
def share() -> str:
    """Make torch's OpenMP runtime visible to libraries that are opened later; return its file, or "".

    The kernels are linked without a runtime. The file name of torch's runtime differs between its distributions. A
    library that named another file would start a second pool of threads, which competes with the first for the cores.
    """
    if sys.platform != "linux":
        return ""
    with contextlib.suppress(OSError, AttributeError):
        bound = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).GOMP_parallel
        place = _Place()
        if ctypes.CDLL(None).dladdr(ctypes.cast(bound, ctypes.c_void_p), ctypes.byref(place)):
            ctypes.CDLL(os.fsdecode(place.file), mode=ctypes.RTLD_GLOBAL)
            return os.fsdecode(place.file)
    return ""


def threads() -> int:
    """Return the number of threads for a kernel: that of torch, but one in a forked child.

    A fork copies the memory of OpenMP's pool but not its threads, so a child that enters a parallel region would wait
    forever. (Operations of torch do so, unless the child calls torch.set_num_threads(1), as workers of DataLoader do.)
    """
    return torch.get_num_threads() if os.getpid() == _OWNER else 1
