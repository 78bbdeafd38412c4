"""Timing on a machine with other load: disturbed samples are rejected and counted."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from .worker import timed

LIMIT = 1e-3  # seconds; a copy of 512 kB takes about a tenth of that on an idle machine
PATIENCE = 5  # further tries for one sample, before a disturbed one is taken
WASTE = 10.0  # seconds of rejected samples in a row, before a disturbed one is taken


class Guard:
    """Detect other load: time a small copy that uses all threads."""

    def __init__(self, limit: float = LIMIT):
        self.limit = limit
        self.source, self.target = torch.ones(131072), torch.zeros(131072)

    def quiet(self) -> bool:
        """Whether the copy took at most the limit."""
        begin = time.perf_counter()
        self.target.copy_(self.source)
        return time.perf_counter() - begin <= self.limit


@dataclass
class Timing:
    """Samples of one candidate, in seconds."""

    samples: list[float] = field(default_factory=list)
    rejected: int = 0
    """samples rejected because the machine was busy"""
    disturbed: int = 0
    """samples kept that were taken on a busy machine, after ``PATIENCE`` tries"""

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples)


def interleave(
    candidates: Mapping[str, Callable[[], object]], rounds: int, guard: Guard | None = None, patience: int = PATIENCE
) -> dict[str, Timing]:
    """Time every candidate once per round, in turn, so that drift affects all of them alike.

    Each is called once before the first round, to warm up; samples as in ``take_turns``.
    """
    for call in candidates.values():
        call()
    return take_turns({name: partial(timed, call) for name, call in candidates.items()}, rounds, guard, patience)


def take_turns(
    samplers: Mapping[str, Callable[[], float]], rounds: int, guard: Guard | None = None, patience: int = PATIENCE
) -> dict[str, Timing]:
    """Take one sample of every candidate per round; a sampler returns seconds.

    A sample counts if the guard finds the machine quiet right before and right after it; otherwise it is rejected and
    taken again, at most ``patience`` times and not after ``WASTE`` seconds of such samples.
    """
    guard = guard or Guard()
    timings = {name: Timing() for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            timing = timings[name]
            wasted = 0.0
            for attempt in range(patience + 1):
                before = guard.quiet()
                begin = time.perf_counter()
                seconds = sample()
                wasted += time.perf_counter() - begin
                quiet = before and guard.quiet()
                if quiet or attempt == patience or wasted > WASTE:
                    timing.disturbed += not quiet
                    timing.samples.append(seconds)
                    break
                timing.rejected += 1
    return timings
