"""Checks of the token counters that states keep."""

import torch
from torch import Tensor

from ..ops.operands import followed, in_memory


def counted(name: str, counts: Tensor, most: int | None = None) -> tuple[int, int]:
    """Return the smallest and the largest counter of a state, counts (B,) int64; (0, 0) without rows.

    Raises:
        ValueError: If a counter is negative or larger than ``most``.
    """
    low, high = _ends(counts) if counts.numel() else (0, 0)
    if low < 0 or (most is not None and high > most):
        odd, least = low if low < 0 else high, "at least 0" if most is None else f"0 to {most}"
        raise ValueError(f"the state's {name} is {odd}, but it counts tokens and must be {least}; the state is damaged")
    return low, high


def _ends(counts: Tensor) -> tuple[int, int]:
    ends = counts.aminmax()
    if counts.is_cpu:
        return int(ends[0]), int(ends[1])
    low, high = torch.stack(ends).tolist()  # one copy to the CPU, so one wait for the device
    return low, high


def readable(counts: Tensor) -> bool:
    """Return whether reading counters needs no synchronization: on the CPU, and not while tracing."""
    return counts.is_cpu and not followed() and in_memory(counts)


def check_counts(name: str, counts: Tensor, most: int | None = None) -> None:
    """Raise what ``counted`` raises, if the counters are ``readable``."""
    if readable(counts):
        counted(name, counts, most)
