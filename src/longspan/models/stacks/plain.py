"""Blocks one after the other: the transformer as it was published, and what the other stacks are made of."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .block import Block


@dataclass
class StackCall:
    """The arguments of one call of a stack, checked for all its blocks, and what the blocks have recorded so far."""

    arguments: dict[str, Any]
    """what every block gets: mask, segments, prefix, context, context_mask, donate"""
    record: dict[str, Any] | None = None
    """what the caller wants to be recorded, or None"""
    checkpointing: bool = False
    carries: dict[str, Any] = field(default_factory=dict)
    """what the last layer of each mechanism has handed on"""
    layers: list[dict[str, Any]] = field(default_factory=list)
    """what each layer has recorded"""
    own_record: dict[str, Any] = field(default_factory=dict)
    """what the stack itself records, such as a penalty"""

    @property
    def mask(self) -> Tensor | None:
        return self.arguments.get("mask")

    def record_for(self, block: Block) -> dict[str, Any] | None:
        """A copy of the caller's record for a block's attention, or None where it records nothing."""
        return dict(self.record) if self.record is not None and "record" in block.attention.supported_args else None


class Plain(nn.Module):
    """Each block once."""

    steps = 1
    penalty = ""
    exempt: ClassVar[dict[str, str]] = {}

    def __init__(self, dim: int):
        super().__init__()

    def start(self, blocks: list[Block], batch: int, capacity: int | None) -> Any:
        """The states before the first token, one for each block."""
        return tuple(block.attention.init_state(batch, capacity) for block in blocks)

    def forward(self, blocks: list[Block], x: Tensor, state: Any, call: StackCall) -> tuple[Tensor, Any]:
        """x (B,N,dim), one state for each block or None -> both after all blocks."""
        recompute = call.checkpointing and state is None and torch.is_grad_enabled()
        states = []
        for i, block in enumerate(blocks):
            record, kind = call.record_for(block), block.attention.name
            if recompute:
                given = {**call.arguments, "carry": call.carries.get(kind)}
                x, carry, record = checkpoint(_recomputed, block, x, given, record, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues] (torch types it as Any | None)
            else:
                before = None if state is None else state[i]
                x, after, carry = block(x, before, carry=call.carries.get(kind), record=record, **call.arguments)
                states.append(after)
            call.layers.append(record or {})
            # The carry is for the next layer of the same mechanism.
            call.carries[kind] = carry
        return x, None if state is None else tuple(states)


def _recomputed(
    block: Block, x: Tensor, given: dict[str, Any], record: dict[str, Any] | None
) -> tuple[Tensor, Any, dict[str, Any] | None]:
    """A block without a state, which the backward pass may run again: with its own record each time."""
    own = None if record is None else dict(record)
    x, _, carry = block(x, None, record=own, **given)
    return x, carry, own
