"""What ends work from outside: Ctrl-C, the SIGTERM of a job manager, the SIGHUP of a terminal that is closed."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

# Windows has no SIGHUP.
ENDING = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or another signal that is treated alike: ``number``. The text says what was kept."""

    def __init__(self, said: str = "", number: int = signal.SIGINT):
        super().__init__(said)
        self.number = number


def number(error: KeyboardInterrupt) -> int:
    """Of the signal that an interruption came from."""
    return error.number if isinstance(error, Interrupted) else signal.SIGINT


def told(error: KeyboardInterrupt, said: str) -> Interrupted:
    """The same interruption, with what it left behind as its text."""
    return Interrupted(said, number(error))


@contextlib.contextmanager
def handled(handler: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call ``handler`` with the number of each signal that would end this process.

    -> a function that sees to it once more, where something else has taken the signals meanwhile.

    Signals that are ignored, as nohup and shells ask for, stay so. SIGHUP counts only as the first of them, since
    shells and systems send it more than once. Outside of the main thread, where Python allows no handlers, nothing
    changes.
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
    """The whole number in an environment variable; 0 where it is not set, empty or something else."""
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def first_rank() -> bool:
    """Whether this process leads; the others of a training that is spread over several are started for their part."""
    # Both: a RANK of 0 may come from outside, and Lightning numbers the processes that it starts by LOCAL_RANK.
    return rank("RANK") == 0 and rank("LOCAL_RANK") == 0


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Each such signal raises ``Interrupted`` where the process is; one that does not lead leaves that to the first."""

    def end(number: int) -> None:
        if first_rank():
            raise Interrupted(number=number)

    with handled(end):
        yield
