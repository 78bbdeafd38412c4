"""Collective operations with gradients. Every process must call each of them, forward and backward.

Their outputs must be connected to what a process returns, also where it uses none of them: a process that leaves out a
backward pass lets the others wait. Sums over an empty part of an output serve as such zeros.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextlib.contextmanager
def exchanging(group: dist.ProcessGroup, others: str = "the other ranks") -> Generator[None, None, None]:
    """Raise RuntimeError with the reason if an exchange with ``others`` fails or takes longer than the timeout."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"sequence_parallel: rank {dist.get_rank()} could not exchange with {others}. All ranks must make the "
            f"same calls, backward passes included; init_process_group(timeout=...) sets how long a rank waits. The "
            f"backend reports: {error}"
        ) from error


def numbers(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x (...) of every rank, (R,...), without gradients."""
    every = x.new_empty(dist.get_world_size(group), *x.shape)
    with exchanging(group):
        _all_gather(every.flatten(), x.contiguous().flatten(), group=group)
    return every


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        return numbers(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        own = grads[0].new_empty(ctx.shape)
        with exchanging(ctx.group):
            _reduce_scatter(own.flatten(), grads[0].contiguous().flatten(), group=ctx.group)
        return own, None


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x (...) of every rank, (R,...): an all-gather forward, a reduce-scatter (sum) backward."""
    found: Any = _Gather.apply(x, group)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = (given, taken), group
        found = x.new_empty(sum(taken), *x.shape[1:])
        with exchanging(group):
            dist.all_to_all_single(found, x.contiguous(), taken, given, group=group)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given, taken = ctx.splits
        own = grads[0].new_empty(sum(given), *grads[0].shape[1:])
        with exchanging(ctx.group):
            dist.all_to_all_single(own, grads[0].contiguous(), given, taken, group=ctx.group)
        return own, None, None, None


def from_before(x: Tensor, hops: int, group: dist.ProcessGroup) -> Tensor:
    """Return x (...) of the ``hops`` ranks before this one, in their order: (min(hops, rank),...).

    An all-to-all forward and backward, in which each rank sends to the ``hops`` ranks after it alone.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given = [int(rank < other <= rank + hops) for other in range(size)]
    taken = [int(rank - hops <= other < rank) for other in range(size)]
    found: Any = _Exchange.apply(x.expand(sum(given), *x.shape), given, taken, group)
    return found
