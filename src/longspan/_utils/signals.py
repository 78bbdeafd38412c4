"""Signals that end work: Ctrl-C, SIGTERM from a job manager, SIGHUP from a closed terminal."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

# Windows has no SIGHUP.
ENDING = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]


class Interrupted(KeyboardInterrupt):
    """Raised for Ctrl-C and signals treated alike. The text describes what was kept; ``number`` is the signal."""

    def __init__(self, kept: str = "", number: int = signal.SIGINT):
        super().__init__(kept)
        self.number = number


def number(error: KeyboardInterrupt) -> int:
    """Return the number of the signal behind an interruption."""
    return error.number if isinstance(error, Interrupted) else signal.SIGINT


def with_text(error: KeyboardInterrupt, kept: str) -> Interrupted:
    """Return the same interruption with a text that describes what was kept."""
    return Interrupted(kept, number(error))


@contextlib.contextmanager
def handled(handler: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call ``handler`` with the number of each signal that would end this process.

    Yields a function that installs the handlers again, for when other code has replaced them.

    Ignored signals, as set by nohup and shells, stay ignored. SIGHUP only counts as the first signal, since shells and
    systems send it more than once. Outside of the main thread, where Python allows no handlers, nothing changes.
    """
    came: list[int] = []
    before = {}

    def take(number: int, _: object) -> None:
        if came and signal.Signals(number).name == "SIGHUP":
            return
        came.append(number)
        handler(number)

    def install() -> None:
        for one in before:
            signal.signal(one, take)

    if threading.current_thread() is threading.main_thread():
        there = {one: signal.getsignal(one) for one in ENDING}
        before = {one: old for one, old in there.items() if old not in (signal.SIG_IGN, None)}
    install()
    try:
        yield install
    finally:
        for one, old in before.items():
            signal.signal(one, old)


def rank(name: str) -> int:
    """Return the whole number in an environment variable; 0 if it is unset, empty or anything else."""
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def first_rank() -> bool:
    """Whether this is the first process of a distributed training, or the only process."""
    # Both: RANK may be 0 from outside, and Lightning numbers the processes that it starts by LOCAL_RANK.
    return rank("RANK") == 0 and rank("LOCAL_RANK") == 0


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise ``Interrupted`` at each such signal in the first process; other processes ignore it."""

    def end(number: int) -> None:
        if first_rank():
            raise Interrupted(number=number)

    with handled(end):
        yield
