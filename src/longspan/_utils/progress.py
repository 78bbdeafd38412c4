"""Progress on stderr: a bar on a terminal, otherwise a line every 20 seconds."""

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
    """A tqdm bar without its monitor thread, which would disturb timings; it disappears at the end."""

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


# The default lock is for several processes, and starts a process on some systems.
Bar.set_lock(threading.RLock())


class Lines:
    """Progress lines for work that counts up to ``total``; all instances together print one every EVERY seconds."""

    last = time.monotonic()

    def __init__(self, total: int, done: int = 0):
        self.total, self.begun, self.begin = total, done, time.monotonic()

    def at(self, done: int, label: str, figures: str = "") -> None:
        """Report that ``done`` items are done; prints only if EVERY seconds have passed."""
        now = time.monotonic()
        if now - Lines.last < EVERY:
            return
        Lines.last = now
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
    """Print a line on stderr; a closed stderr is ignored."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def track(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield ``items`` and show the progress up to ``total``; the label includes items that are strings."""
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
