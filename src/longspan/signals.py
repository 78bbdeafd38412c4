"""What ends work from outside: Ctrl-C, the SIGTERM of a job manager, the SIGHUP of a terminal that is closed."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

# Windows has no SIGHUP.
ENDING = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]
# Where launchers write which of several processes this is; Lightning reads each of them.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


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


def first_rank() -> bool:
    """Whether this process leads; the others of a training that is spread over several are started for their part.

    One whose rank is no number leads, since no launcher has started it; ``check_ranks`` refuses it.
    """
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return not _is_rank(rank) or int(rank) == 0


def check_ranks() -> None:
    """Raise ValueError for a number of this process, which launchers set, that is not a number from 0 on."""
    for name in RANKS:
        if not _is_rank(text := os.environ.get(name, "0")):
            raise ValueError(
                f"the environment variable {name}={text!r} must be a whole number from 0 on, as torchrun sets it; "
                f"unset it to train in one process"
            )


def _is_rank(text: str) -> bool:
    return text.isascii() and text.strip().isdigit()


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Each such signal raises ``Interrupted`` where the process is; one that does not lead leaves that to the first."""

    def end(number: int) -> None:
        if first_rank():
            raise Interrupted(number=number)

    with handled(end):
        yield
