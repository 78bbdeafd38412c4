"""One writer at a time: a lock that the system itself releases when its process ends, however it ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def exclusive_lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``, which only a process that was killed leaves behind, unlocked.

    Raises ValueError, at once, where another process holds it (``what`` is what it writes); OSError where there can be
    no such file.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another process is writing {what}; wait for its end, or choose another folder") from error
    try:
        yield
    finally:
        # While it is held: who has opened it meanwhile finds that it has no name any more (filelock, from 4 on).
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()
