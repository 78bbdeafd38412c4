"""Rows of tokens that several processes of a training share (sequence parallelism)."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist

from .config import TrainConfig


def reader(run: TrainConfig, rank: int) -> int:
    """Which of the ``run.readers`` groups of processes ``rank`` belongs to; neighbors share rows."""
    return rank // run.sequence_parallel


class Rows:
    """The part of each row that this process has.

    Args:
        group: The processes that share each row, in the order of its tokens; None: this one has whole rows.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group

    @classmethod
    def of(cls, run: TrainConfig) -> "Rows":
        """Make the groups of a run; all processes call this together."""
        size = run.sequence_parallel
        if size == 1:
            return cls()
        # New groups, also where one has all processes: exchanges of layers must not wait in line with gradients of
        # DDP or FSDP2, whose order among them differs between the ranks of a row.
        groups = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(run.readers)]
        own: Any = groups[reader(run, dist.get_rank())]
        return cls(own)

    def part(self, x: Tensor) -> Tensor:
        """Return this process's tokens (B,N_r) of whole rows (B,N)."""
        if self.group is None:
            return x
        from ..distributed import shard

        return shard(x, self.group)

    def shared(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which calls of ``model`` take this process's part of rows."""
        if self.group is None:
            return contextlib.nullcontext()
        from ..distributed import sequence_parallel

        return sequence_parallel(model, self.group)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean () of values (B,N_r) for a step whose gradients are averaged over processes.

        With shared rows it is the mean over the rows of all processes; else that over the own rows.
        """
        if self.group is None:
            return values.mean()
        from ..distributed import mean_over_ranks

        return mean_over_ranks(values)
