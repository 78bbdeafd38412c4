"""Processes that train together: they compare their runs before the first step, and report where they wait."""

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import distributed as dist

from .._utils import progress
from .config import TrainConfig

SLOW = 60.0  # seconds at one place after which a process prints where it is


def require_same(values: Mapping[str, Any]) -> None:
    """Compare plain values by name with those of the other processes; all of them call this together.

    Raises:
        ValueError: In all processes, for the first value that differs.
    """
    found: list[Mapping[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, dict(values))
    first = found[0]
    for rank, other in enumerate(found):
        for name in {**first, **other}:
            one, two = (values.get(name, "absent") for values in (first, other))
            if one != two:
                raise ValueError(
                    f"the processes of this training differ: {name} is {one!r} in process 0 and {two!r} in process "
                    f"{rank}; start all of them with the same settings and data"
                )


class Watch:
    """Prints a line when a process of several stays at one place of the training for a minute.

    Args:
        run: The training run.
    """

    def __init__(self, run: TrainConfig):
        self.run = run
        self.rank = 0
        """the number of this process, once it is known"""
        self.enter("the start")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        if self.run.world > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()

    def enter(self, place: str) -> None:
        """Note the place of the training that begins, such as "step 7"."""
        # One assignment, since the thread reads both.
        self.at = place, time.monotonic()

    def explain(self, error: BaseException) -> str:
        """What broke the connection to the other processes; "" for another error."""
        text = str(error)
        # gloo has no class for its errors.
        if not isinstance(error, dist.DistError) and "third_party/gloo" not in text:
            return ""
        place, _ = self.at
        if "imed out" in text:
            return (
                f"process {self.rank} waited at {place} for another process longer than run.timeout={self.run.timeout} "
                "s: the other process has stopped, or needs a larger run.timeout"
            )
        return f"process {self.rank} lost another process at {place}, which has printed the reason or was killed"

    def _watch(self) -> None:
        said = None
        while not self._ended.wait(1.0):
            place, since = now = self.at
            if now is not said and time.monotonic() - since >= SLOW:
                said = now
                progress.say(
                    f"longspan: process {self.rank} of {self.run.world} has been at {place} for {SLOW:.0f} s; if it "
                    f"waits for a process that has stopped, the training ends after run.timeout={self.run.timeout} s"
                )
