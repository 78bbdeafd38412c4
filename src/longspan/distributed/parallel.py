"""The public side of sequence parallelism: a context for a model, and helpers for its inputs and its loss."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..attention.base import Attention
from ..models.decoder import Decoder
from ..models.stacks import Stack
from ..models.stacks.reversible import Reversible
from ..models.stacks.universal import Act
from ..ops import shards as hook
from .collectives import exchanging
from .layout import Layout
from .shards import ShardsOf

Group = dist.ProcessGroup | DeviceMesh | None

ARGUMENTS = ("mask", "segments")


@contextlib.contextmanager
def sequence_parallel(model: nn.Module, group: Group = None) -> Generator[None, None, None]:
    """Let calls of a model take shards of rows, one on each rank, inside a ``with`` block.

    Rank r of the group passes shard r of each row: contiguous tokens, in the order of the ranks, as ``shard`` cuts
    them. Outputs, and gradients summed over the ranks, are those of one process with whole rows, up to rounding.
    Shards may have different lengths. ``mask`` and ``segments`` are cut like the tokens; ids are those of whole rows.
    Without a state the call returns None. With one, every rank passes the state before the whole row, and gets the
    state after its own shard; that of the last rank is the state after the row.

    Linear attention, decays and the delta rule exchange one state per layer, whose size does not depend on the length.
    Windows and short convolutions get the last tokens before the shard. ``softmax`` gathers keys and values. Any other
    causal attention gets its state from the rank before: while rank r works on a layer, rank r - 1 works on the next.

    All ranks must make the same calls, backward passes included, with gradients for the same weights. A rank that waits
    longer than ``init_process_group(timeout=...)`` raises RuntimeError. The backward pass may come after the block. Any
    part of a row may be padding. NaN in one packed document may reach the others of its row.

    Args:
        model: A decoder, a stack, an attention, or a module with some of them, whose first argument is (B,N,...).
        group: The ranks that share each row: a process group, or a device mesh of one dimension; None for all ranks.

    Raises:
        ValueError: A part of the model, or an argument of a call, has no exact form on shards: bidirectional and cross
            attention, prefix, record, donate, carries between layers, sampling, adaptive computation time, reversible
            stacks, and memories without gradients.

    Example:
        >>> import torch, longspan
        >>> from longspan.distributed import mean_over_ranks, sequence_parallel, shard_inputs
        >>> def loss_of(model: longspan.Decoder, tokens: torch.Tensor) -> torch.Tensor:
        ...     inputs, targets = shard_inputs(model, tokens)
        ...     with sequence_parallel(model):
        ...         outputs, _ = model(inputs)
        ...     return mean_over_ranks(-model.likelihood.log_prob(outputs, targets))
    """
    ranks = _process_group(group)
    check(model)
    before: list[hook.Shards | None] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("tokens", kwargs.get("x"))
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise ValueError("a sequence-parallel model takes its tokens (B, N, ...) as the first argument")
        for name in ("prefix", "context", "record", "donate"):
            if (given := kwargs.get(name)) is not None and given is not False:
                raise ValueError(f"{name}= has no exact form under sequence parallelism; leave it out")
        mask, segments = (kwargs.get(name) for name in ARGUMENTS)
        layout = Layout(x.shape[0], x.shape[1], mask, segments, ranks, x.device)
        before.append(hook.set_shards(ShardsOf(layout)))

    def leave(*_: Any) -> None:
        if before:
            hook.set_shards(before.pop())

    handles = [
        model.register_forward_pre_hook(enter, with_kwargs=True),
        model.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _process_group(group: Group) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("there are no ranks yet; call torch.distributed.init_process_group first, under torchrun")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            named = group.mesh_dim_names or tuple(range(group.ndim))
            raise ValueError(f"a mesh must have one dimension, such as mesh['sequence'], not {named}")
        return group.get_group()
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def check(model: nn.Module) -> None:
    """Raise ValueError for the first part of a model that has no exact form on shards."""
    for name, part in model.named_modules():
        at = f" ({name})" if name else ""
        if isinstance(part, Attention) and (why := _why_not(part)):
            raise ValueError(f"{part.spec}{at} has no exact form under sequence parallelism: {why}")
        if isinstance(part, Stack) and part.crosses:
            raise ValueError(f"the stack{at} has cross attention, which has no form under sequence parallelism")
        if isinstance(part, Act):
            raise ValueError(f"act{at} stops when the tokens of one process have halted; use another stack")
        if isinstance(part, Reversible):
            raise ValueError(f"reversible{at} recomputes blocks without their calls; use checkpointing=True instead")


def _why_not(attention: Attention) -> str:
    """Return why shards of an attention cannot give the result of whole rows; empty if they can."""
    if not attention.causal:
        return "it is bidirectional, so that every rank would need all tokens"
    if attention.has_layer_carry:
        return "it passes a value over whole rows from layer to layer"
    if attention.samples:
        return "it samples, with different random numbers on each rank"
    if attention.training and getattr(attention, "noise", 0.0):
        return "it draws noise in training, with different random numbers on each rank; use noise=0.0"
    if attention.statistics:
        return "its statistics are those of whole batches"
    if getattr(attention, "stop_gradient", False):
        return "no gradient enters its memory, so that gradients would end at each shard; use stop_gradient=False"
    return ""


def shard(x: Tensor, group: Group = None, *, dim: int = 1) -> Tensor:
    """Return this rank's part of a tensor that all ranks hold.

    Args:
        x: (B,N,...), such as tokens, targets, mask or segments.
        group: As in ``sequence_parallel``.
        dim: The dimension of the tokens.

    Returns:
        (B,N_r,...), contiguous tokens in the order of the ranks. If the number of ranks does not divide N, the first
        shards have one token more.

    Raises:
        ValueError: there are fewer tokens than ranks.
    """
    ranks = _process_group(group)
    size = dist.get_world_size(ranks)
    if x.shape[dim] < size:
        raise ValueError(f"{x.shape[dim]} tokens cannot be spread over {size} ranks; each needs at least one")
    return torch.tensor_split(x, size, dim)[dist.get_rank(ranks)]


def shard_inputs(model: Decoder, tokens: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets for a decoder.

    The row is shifted as a whole and cut then: shifting a shard would put a start token into the row.

    Args:
        model: The decoder.
        tokens: (B,N) int64, whole rows, the same on all ranks of the group.
        group: As in ``sequence_parallel``.

    Returns:
        Inputs and targets, (B,N_r) each.

    Raises:
        ValueError: there are fewer tokens than ranks.
    """
    return shard(model.shift(tokens), group), shard(tokens, group)


def mean_over_ranks(values: Tensor, mask: Tensor | None = None, group: Group = None) -> Tensor:
    """Return the mean over the real tokens of all ranks, as a loss for DDP or FSDP2.

    A mean of the means of the ranks is wrong if they have different numbers of real tokens. The value is the same on
    all ranks. Its gradients are R times those of this rank's part of the mean, since DDP and FSDP2 average gradients
    over the R ranks of ``group``.

    Args:
        values: One number for each token of this rank, of any shape.
        mask: Bool, of the same shape, True on real tokens; None: all are.
        group: All ranks over which gradients are averaged: those of the data and of the sequence. None for all.

    Returns:
        A scalar.

    Raises:
        ValueError: mask has another shape or dtype.
    """
    ranks = _process_group(group)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != values.shape):
        came = f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"mask must be bool {tuple(values.shape)}, not {came}")
    own = (values if mask is None else torch.where(mask, values, 0.0)).sum()
    count = torch.tensor(values.numel(), device=values.device) if mask is None else mask.sum()
    both = torch.stack([own.detach().double(), count.double()])
    with exchanging(ranks):
        dist.all_reduce(both, group=ranks)
    total, real = both.unbind()
    own = own * (dist.get_world_size(ranks) / real.clamp(min=1)).to(own.dtype)
    return own + ((total / real.clamp(min=1)).to(own.dtype) - own).detach()
