"""The plain stack, one block after the other, as in the published transformer; base of the other stacks."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ...ops.shards import active_shards
from .block import Block


@dataclass
class StackCall:
    """The checked arguments of one call of a stack, and what its blocks have recorded so far."""

    arguments: dict[str, Any]
    """arguments of every block: mask, segments, prefix, context, context_mask, donate"""
    record: dict[str, Any] | None = None
    """the caller's record, or None"""
    checkpointing: bool = False
    carries: dict[str, Any] = field(default_factory=dict)
    """the carry from the last layer of each mechanism"""
    layers: list[dict[str, Any]] = field(default_factory=list)
    """the record of each layer"""
    own_record: dict[str, Any] = field(default_factory=dict)
    """records of the stack itself, such as a penalty"""

    @property
    def mask(self) -> Tensor | None:
        return self.arguments.get("mask")

    def record_for(self, block: Block) -> dict[str, Any] | None:
        """Return a copy of the caller's record for a block's attention, or None if it records nothing."""
        return dict(self.record) if self.record is not None and "record" in block.attention.supported_args else None


class Plain(nn.Module):
    """Each block once, in order."""

    steps = 1
    penalty = ""
    exempt: ClassVar[dict[str, str]] = {}

    def __init__(self, dim: int):
        super().__init__()

    def start(self, blocks: list[Block], batch: int, capacity: int | None) -> Any:
        """Return the states before the first token, one for each block."""
        return tuple(block.attention.init_state(batch, capacity) for block in blocks)

    def forward(self, blocks: list[Block], x: Tensor, state: Any, call: StackCall) -> tuple[Tensor, Any]:
        """Run all blocks.

        Args:
            blocks: The blocks.
            x: (B,N,dim) inputs.
            state: One state for each block, or None.
            call: The arguments of the call; receives the records.

        Returns:
            The outputs (B,N,dim) and the next states, or None.
        """
        recompute = call.checkpointing and state is None and torch.is_grad_enabled()
        # A recomputation exchanges again, outside of the model's call.
        shards = active_shards()
        contexts = noop_context_fn if shards is None else shards.contexts
        states = []
        for i, block in enumerate(blocks):
            record, kind = call.record_for(block), block.attention.name
            if recompute:
                given = {**call.arguments, "carry": call.carries.get(kind)}
                run: Any = checkpoint(_recomputed, block, x, given, record, use_reentrant=False, context_fn=contexts)
                x, carry, record = run
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
    """Run a block without a state, with a new record, since checkpointing may run it twice."""
    own = None if record is None else dict(record)
    x, _, carry = block(x, None, record=own, **given)
    return x, carry, own
