"""Free memory of the machine or container."""

import contextlib
import os
from pathlib import Path

# Returned if the system gives no figure; more than any machine that runs this has.
UNKNOWN = 1 << 40
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
# (limit, use) of the process's own group in a container, of cgroups version 2 and 1.
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available() -> int:
    """Return the free bytes, file caches included, of the machine or its container, whichever is less."""
    free = _of_machine()
    for limit, use in _LIMITS:
        # "max" means no limit, and int() rejects it.
        with contextlib.suppress(OSError, ValueError):
            most = int((CGROUPS / limit).read_text())
            free = min(free, max(0, most - int((CGROUPS / use).read_text()) + _cached(limit)))
    return free


def _of_machine() -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = MEMINFO.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return UNKNOWN


def _cached(limit: str) -> int:
    """Bytes of file caches, which the system can reclaim."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (CGROUPS / limit).with_name("memory.stat").read_text().splitlines()
        names = ("inactive_file ", "total_inactive_file ")
        return next(int(line.split()[1]) for line in lines if line.startswith(names))
    return 0
