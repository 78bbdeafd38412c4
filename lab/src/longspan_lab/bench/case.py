"""One comparison: candidates and limits of the machine, timed in turns."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from . import worker
from .candidates import Refused, Sampler, repeated
from .guard import Guard, Timing, take_turns

T = TypeVar("T")
Watch = Callable[[Iterable[T], int, str], Iterable[T]]
"""items, number of items, label -> the items, with a progress bar"""


@dataclass(frozen=True)
class Figure:
    """The time of one candidate in one case."""

    seconds: float
    """seconds of one call, the median over samples"""
    fastest: float
    samples: int
    calls: int
    """consecutive calls per sample"""
    rejected: int
    """samples rejected because the machine was busy"""
    disturbed: int
    """samples kept that were taken on a busy machine"""

    def row(self) -> dict[str, Any]:
        """The fields as columns of a table."""
        return asdict(self)


def bound(call: worker.Call) -> Sampler:
    """A limit of the machine as a sampler, for the same turns."""
    return partial(worker.timed, call)


def take(
    samplers: dict[str, Sampler], rounds: int, label: str, watch: Watch, *, warm: bool = True
) -> tuple[dict[str, Figure], dict[str, str]]:
    """Time every sampler; return figures, and the errors of those that failed.

    ``warm=False`` takes single calls and none before the first sample, for those that take long.
    """
    ready, calls, failed = {}, {}, {}
    for name, sampler in samplers.items():
        try:
            sample, calls[name] = repeated(sampler) if warm else (partial(sampler, 1), 1)
        except Refused as error:
            failed[name] = str(error)
            continue
        ready[name] = partial(_sample, sample, name, failed)
    timings = {name: Timing() for name in ready}
    guard = Guard()
    turns = [*ready] * rounds
    for name in watch(turns, len(turns), label):
        timing, whole = take_turns({name: ready[name]}, 1, guard)[name], timings[name]
        whole.samples += timing.samples
        whole.rejected += timing.rejected
        whole.disturbed += timing.disturbed
    figures = {
        name: Figure(t.seconds, min(t.samples), len(t.samples), calls[name], t.rejected, t.disturbed)
        for name, t in timings.items()
        if name not in failed
    }
    return figures, failed


def _sample(sample: Callable[[], float], name: str, failed: dict[str, str]) -> float:
    """Take a sample; a failure ends the candidate, not the case."""
    if name not in failed:
        try:
            return sample()
        except Refused as error:
            failed[name] = str(error)
    return math.nan


def available() -> float:
    """Available memory in MB; infinite if the system does not report it."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="utf-8") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("MemAvailable:"))
    return math.inf
