"""Exclusive file locks, which the system releases when the process ends for any reason."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def exclusive_lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``. A killed process leaves the file behind, unlocked.

    Raises ValueError immediately if another process holds the lock (``what`` names its output), and OSError if the file
    cannot be made.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another process is writing {what}; wait until it ends, or choose another folder") from error
    try:
        yield
    finally:
        # Removed while the lock is held: a process that has it open finds it deleted (filelock, from 4 on).
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()
