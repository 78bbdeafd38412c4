"""Checks of the token counters that states keep."""

import torch
from torch import Tensor

from ..ops.operands import in_memory, transformed


def counted(name: str, counts: Tensor, most: int | None = None) -> tuple[int, int]:
    """The fewest and the most tokens that the rows of a state count, counts (B,) int64; (0, 0) without rows.

    Raises ValueError where that is fewer than none, or more than ``most``.
    """
    low, high = (int(t) for t in counts.aminmax()) if counts.numel() else (0, 0)
    if low < 0 or (most is not None and high > most):
        odd, least = low if low < 0 else high, "at least 0" if most is None else f"0 to {most}"
        raise ValueError(f"the state's {name} is {odd} where it counts tokens, {least}; it is damaged or was changed")
    return low, high


def check_counts(name: str, counts: Tensor, most: int | None = None) -> None:
    """What ``counted`` refuses, where looking costs no waiting: on the CPU, and not while anything traces."""
    if counts.is_cpu and not torch.compiler.is_compiling() and not transformed() and in_memory(counts):
        counted(name, counts, most)
