"""A memory of inputs (Transformer-XL): each call projects keys and values from it, read by content and distance."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.sinusoidal import sinusoid
from ..ops import rows
from ..ops.softmax import relative
from ..ops.softmax.relative import Table
from ..ops.tensors import positions, split
from .counters import check_counts


class Memory(NamedTuple):
    """The inputs of the last S real tokens; the latest one is in the last slot."""

    hidden: Tensor  # (B,S,dim)
    position: Tensor  # (B,) int64, real tokens so far


class MemoryCall(NamedTuple):
    """The tokens of the memory and those of a call, in their order, with the positions of the latter."""

    tokens: Tensor  # (B,S+N,dim), S = 0 without a memory
    mask: Tensor | None  # (B,N) bool
    at: Tensor  # (B,N) int64, real tokens first: position of each in its document
    segments: Tensor | None  # (B,N) int64, real tokens first

    def together(self, x: Tensor, axis: int = 1) -> Tensor:
        """Move real tokens to the front along the axis of N or S+N entries; the memory stays in front of them."""
        if self.mask is None:
            return x
        mask = F.pad(self.mask, (x.shape[axis] - self.mask.shape[1], 0), value=True)
        return rows.gather_valid(mask, x.movedim(axis, 1))[0].movedim(1, axis)


class MemoryView(NamedTuple):
    """Queries of the real tokens by content and by position (B,H,N,D), and projections of keys and values."""

    content: Tensor
    position: Tensor
    project: Callable[[Tensor], tuple[Tensor, Tensor]]  # (B,M,dim) -> keys and values (B,G,M,.)
    table: Table
    after: Callable[[Tensor], Tensor]  # the output of ``relative.attend`` -> (B,H,N,D)


def empty(batch: int, slots: int, dim: int, like: Tensor) -> Memory:
    """Return a memory without tokens, in the dtype and on the device of ``like``."""
    return Memory(like.new_zeros(batch, slots, dim), torch.zeros(batch, dtype=torch.long, device=like.device))


def begin(x: Tensor, memory: Memory | None, mask: Tensor | None, segments: Tensor | None, *, stop: bool) -> MemoryCall:
    """Put x (B,N,dim) after the memory, if there is one. ``stop``: no gradients into it.

    Raises:
        ValueError: For a memory on the CPU with a negative position, except while a compiler traces.
    """
    packed = segments if segments is None else rows.gather_valid(mask, segments)[0]
    if memory is None:
        return MemoryCall(x, mask, positions(x, segments=packed)[0], packed)
    check_counts("position", memory.position)
    at, _ = positions(x, memory.position, segments=packed)
    hidden = memory.hidden.detach() if stop else memory.hidden
    return MemoryCall(torch.cat([hidden.to(x.dtype), x], 1), mask, at, packed)


def end(call: MemoryCall, memory: Memory, segments: Tensor | None, *, stop: bool) -> Memory:
    """Return the memory after these tokens; ``segments`` are those of the call."""
    tokens = call.together(call.tokens.detach() if stop else call.tokens)
    hidden = rows.last_valid(tokens, call.mask, memory.hidden.shape[1]).to(memory.hidden.dtype)
    return Memory(hidden, positions(call.at, memory.position, mask=call.mask, segments=segments)[1])


class Weights(NamedTuple):
    """What a mechanism with relative positions has besides its queries. The maps are dim -> dim, without bias."""

    u: Tensor  # (H,D) bias of the content term
    v: Tensor  # (H,D) bias of the position term
    key: nn.Module
    value: nn.Module
    distance: nn.Module


def view(call: MemoryCall, q: Tensor, weights: Weights, *, clamp: int, few: bool) -> MemoryView:
    """Combine queries with their biases, and choose how keys, values and distances are projected.

    Args:
        call: The tokens.
        q: (B,N,H*D) queries in the order of the call.
        weights: Biases and linear maps.
        clamp: The largest distance that is distinguished; 0: all.
        few: Absorb the maps into the queries, which is cheaper for few queries. Only plain linear maps are absorbed.
    """
    u, v, key, value, distance = weights
    heads, dim = u.shape[0], q.shape[-1]
    q = split(call.together(q), heads)
    content, position = q + u[:, None], q + v[:, None]

    def waves(first: int, last: int) -> Tensor:
        apart = torch.arange(first, last - 1, -1, device=q.device)
        return sinusoid((apart.clamp(-clamp, clamp) if clamp else apart)[None], dim, q.dtype)

    if few and type(key) is nn.Linear and type(value) is nn.Linear and type(distance) is nn.Linear:
        content, position = relative.absorb(content, key.weight), relative.absorb(position, distance.weight)
        weight = value.weight

        def plain(x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, None], x[:, None]

        return MemoryView(content, position, plain, waves, lambda o: relative.release(o, weight))

    def project(x: Tensor) -> tuple[Tensor, Tensor]:
        return split(key(x), heads), split(value(x), heads)

    return MemoryView(content, position, project, lambda *ends: split(distance(waves(*ends)), heads)[0], lambda o: o)
