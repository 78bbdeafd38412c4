"""Blocks one after the other: the transformer as it was published, and what the other stacks are made of."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .block import Block


@dataclass
class LayerCall:
    """What one call of a stack hands to its blocks, and what they have told so far."""

    arguments: dict[str, Any]
    """mask, segments, prefix, checked for all layers"""
    record: dict | None = None
    """what the caller wants to be told, or None"""
    donate: bool = False
    checkpointing: bool = False
    carries: dict[str, Any] = field(default_factory=dict)
    """what the last layer of each mechanism has handed on"""
    layers: list[dict] = field(default_factory=list)
    """what each layer has told"""
    told: dict[str, Any] = field(default_factory=dict)
    """what the stack itself tells, ``penalty`` among it"""

    @property
    def mask(self) -> Tensor | None:
        return self.arguments.get("mask")

    def asks(self, block: Block) -> dict | None:
        """The record for a block's attention: a copy of the caller's, or None where it can tell nothing."""
        return dict(self.record) if self.record is not None and "record" in block.attention.supported_args else None

    def through(self, block: Block, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """x (B,N,dim) and the state of the block's attention -> both after it. What it hands on and tells is kept."""
        kind = block.attention.name
        given = {**self.arguments, "carry": self.carries.get(kind), "donate": self.donate}
        if self.checkpointing and state is None and torch.is_grad_enabled():
            x, carry, told = checkpoint(_whole, block, x, given, self.asks(block), use_reentrant=False)  # type: ignore
        else:
            told = self.asks(block)
            x, state, carry = block(x, state, record=told, **given)
        self.layers.append(told or {})
        # What a layer hands on is for the next one of its own kind.
        self.carries[kind] = carry
        return x, state


def _whole(block: Block, x: Tensor, given: dict[str, Any], record: dict | None) -> tuple[Tensor, Any, dict | None]:
    """A block without a state, of which the backward may make all again: a record of its own each time."""
    told = None if record is None else dict(record)
    x, _, carry = block(x, None, record=told, **given)
    return x, carry, told


class Plain(nn.Module):
    """Each block once."""

    steps = 1
    penalty = ""
    exempt: ClassVar[dict[str, str]] = {}

    def __init__(self, dim: int):
        super().__init__()

    def start(self, blocks: nn.ModuleList, batch: int, capacity: int | None) -> tuple:
        """The states before the first token, one for each block."""
        return tuple(block.attention.init_state(batch, capacity) for block in blocks)  # type: ignore[union-attr]

    def forward(
        self, blocks: nn.ModuleList, x: Tensor, state: tuple | None, call: LayerCall
    ) -> tuple[Tensor, tuple | None]:
        """x (B,N,dim), the state -> both after all blocks."""
        return run_blocks(blocks, x, state, call)


def run_blocks(blocks: nn.ModuleList, x: Tensor, state: tuple | None, call: LayerCall) -> tuple[Tensor, tuple | None]:
    """Every block in its turn: x (B,N,dim), one state for each block -> both after them."""
    new = []
    for i, block in enumerate(blocks):
        x, after = call.through(block, x, None if state is None else state[i])  # type: ignore[arg-type]
        new.append(after)
    return x, None if state is None else tuple(new)
