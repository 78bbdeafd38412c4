"""A memory of inputs, from which keys and values are projected in every call, read by content and distance."""

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
    """The inputs of the last S real tokens, the very last in the last slot."""

    hidden: Tensor  # (B,S,dim)
    position: Tensor  # (B,) int64, real tokens so far


class MemoryCall(NamedTuple):
    """The tokens of one call and those of the memory before them, in their order, and what is known of the former."""

    tokens: Tensor  # (B,S+N,dim), S = 0 without a memory
    mask: Tensor | None  # (B,N) bool
    at: Tensor  # (B,N) int64, for real tokens together: how many there are before each in its own document
    segments: Tensor | None  # (B,N) int64, for real tokens together

    def together(self, x: Tensor, axis: int = 1) -> Tensor:
        """N or S+N entries along the axis, one for each token, with real ones together; the memory stays in front."""
        if self.mask is None:
            return x
        mask = F.pad(self.mask, (x.shape[axis] - self.mask.shape[1], 0), value=True)
        return rows.gather_valid(mask, x.movedim(axis, 1))[0].movedim(1, axis)


class MemoryView(NamedTuple):
    """What real tokens together ask, by content and by position (B,H,N,D), and how they find it."""

    content: Tensor
    position: Tensor
    project: Callable[[Tensor], tuple[Tensor, Tensor]]  # (B,M,dim) -> keys and values (B,G,M,.)
    table: Table
    after: Callable[[Tensor], Tensor]  # what the heads read (B,H,N,D), of what ``relative.attend`` gives


def empty(batch: int, slots: int, dim: int, like: Tensor) -> Memory:
    """No tokens yet; dtype and device of ``like``."""
    return Memory(like.new_zeros(batch, slots, dim), torch.zeros(batch, dtype=torch.long, device=like.device))


def begin(x: Tensor, memory: Memory | None, mask: Tensor | None, segments: Tensor | None, *, stop: bool) -> MemoryCall:
    """x (B,N,dim) after a memory, if there is one. ``stop``: no gradients into it.

    Raises ValueError for a memory on the CPU that counts fewer tokens than none, except while a compiler traces.
    """
    packed = segments if segments is None else rows.gather_valid(mask, segments)[0]
    if memory is None:
        return MemoryCall(x, mask, positions(x, segments=packed)[0], packed)
    check_counts("position", memory.position)
    at, _ = positions(x, memory.position, segments=packed)
    hidden = memory.hidden.detach() if stop else memory.hidden
    return MemoryCall(torch.cat([hidden.to(x.dtype), x], 1), mask, at, packed)


def end(call: MemoryCall, memory: Memory, segments: Tensor | None, *, stop: bool) -> Memory:
    """The memory after these tokens; ``segments`` as the call came with them."""
    tokens = call.together(call.tokens.detach() if stop else call.tokens)
    hidden = rows.last_valid(tokens, call.mask, memory.hidden.shape[1]).to(memory.hidden.dtype)
    return Memory(hidden, positions(call.at, memory.position, mask=call.mask, segments=segments)[1])


def view(
    call: MemoryCall,
    q: Tensor,
    u: Tensor,
    v: Tensor,
    key: nn.Module,
    value: nn.Module,
    distance: nn.Module,
    *,
    clamp: int,
    few: bool,
) -> MemoryView:
    """Queries q (B,N,H*D), in the order of the call, with biases u, v (H,D), and how tokens and distances meet them.

    ``few``: there are so few queries that they are taken to the inputs of ``key``, ``value`` and ``distance``, (dim ->
    dim) without bias, rather than these to the queries. That is not for modules other than plain linear maps.
    """
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
