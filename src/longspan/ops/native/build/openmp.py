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
    """C's Dl_info: where an address comes from."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@functools.cache
def share() -> str:
    """Let libraries that are opened later use torch's OpenMP runtime; -> its file, "" where torch has none to share.

    The kernels name no runtime. torch's has a file name that differs between its distributions, and a library that
    asked for another name would start a second pool of threads, which competes with the first for the cores. So the
    runtime that torch itself is bound to is made visible to what is opened after this call.
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
    """How many threads a kernel may use: torch's number, but one in a forked child.

    A fork copies the memory of OpenMP's pool and none of its threads, so a child that entered a parallel region would
    wait for them for ever. (torch's own operations do, unless torch.set_num_threads(1) is called there, which
    DataLoader does in its workers.)
    """
    return torch.get_num_threads() if os.getpid() == _OWNER else 1
