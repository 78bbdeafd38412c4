"""How far long work is, on stderr: a bar on a terminal, and elsewhere a line now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
FIRST = 1.0  # seconds before a bar is drawn
EVERY = 20.0  # seconds between two lines
LINE = "{desc} {n_fmt}/{total_fmt}, {remaining} left{postfix}"


class Bar(tqdm):
    """A bar that is drawn by who counts, and by no thread, which measurements would feel; it disappears at its end."""

    monitor_interval = 0

    def __init__(self, total: int, label: str, done: int = 0):
        super().__init__(
            total=total,
            desc=label,
            initial=done,
            leave=False,
            delay=FIRST,
            miniters=1,
            dynamic_ncols=True,
            file=sys.stderr,
        )


# The usual one is for several processes, and is one more process on some systems.
Bar.set_lock(threading.RLock())


class Lines:
    """Lines about work that counts up to ``total``; of all such work together one is said every EVERY seconds."""

    said = time.monotonic()

    def __init__(self, total: int, done: int = 0):
        self.total, self.begun, self.begin = total, done, time.monotonic()

    def at(self, done: int, label: str, figures: str = "") -> None:
        """``done`` are done; said only if it is time."""
        now = time.monotonic()
        if now - Lines.said < EVERY:
            return
        Lines.said = now
        say(
            tqdm.format_meter(
                done, self.total, now - self.begin, initial=self.begun, prefix=label, postfix=figures, bar_format=LINE
            )
        )


def watched() -> bool:
    """Whether stderr is a terminal."""
    # Under pythonw there is none.
    return sys.stderr is not None and sys.stderr.isatty()


def say(text: str) -> None:
    """A line on stderr. That nobody can read it any more must not end the work."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def track(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield ``items``, of which there are ``total``, and show how far they are; items that are words are named."""
    if not watched():
        lines = Lines(total)
        for done, item in enumerate(items):
            lines.at(done, f"{label}, {item}:" if isinstance(item, str) else f"{label}:")
            yield item
        return
    with Bar(total, label) as bar:
        for item in items:
            if isinstance(item, str):
                bar.set_postfix_str(item, refresh=False)
            yield item
            bar.update()
