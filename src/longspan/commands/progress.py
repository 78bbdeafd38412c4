"""A bar on stderr for work that turns out to be long."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")


def track(
    items: Iterable[T],
    total: int,
    label: str,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield ``items``, of which there are ``total``; draws on a terminal only, and only after the first second."""
    stream = stream or sys.stderr
    # Without a terminal, and under pythonw without a stderr, nobody watches.
    if stream is None or not stream.isatty():
        yield from items
        return
    begin, drawn = clock(), float("-inf")
    try:
        for done, item in enumerate(items, 1):
            yield item
            now = clock()
            if now - begin > 1 and now - drawn > 0.1:
                drawn = now
                bar = "#" * (20 * done // max(total, done))
                left = (now - begin) / done * (total - done)
                stream.write(f"\r\x1b[K{label} {done}/{total} [{bar:<20}] {left:.0f} s left")
                stream.flush()
    finally:
        if drawn > begin:
            stream.write("\r\x1b[K")
            stream.flush()
