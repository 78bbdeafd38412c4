"""What a case may take: seconds, and memory on top of what the process has."""

import contextlib
import signal
import sys
from collections.abc import Iterator


class TooLong(Exception):
    """A case went on for longer than it may."""


@contextlib.contextmanager
def bounded(seconds: float, gib: float) -> Iterator[None]:
    """Raise TooLong after ``seconds``, and let allocations beyond ``gib`` fail where the system supports it."""
    if sys.platform != "linux":
        yield
        return
    import resource

    def end(*_: object) -> None:
        raise TooLong(f"it took more than {seconds} s")

    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, end)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(gib * 2**30), hard))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def complaint(error: BaseException) -> str | None:
    """What is wrong with how something was refused: None for a ValueError whose message is one line."""
    if not isinstance(error, ValueError):
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    said = str(error)
    if not said.strip() or "\n" in said or len(said) > 2000:
        return f"a message of {len(said)} characters and {said.count(chr(10)) + 1} lines: {said[:100]!r}"
    return None
