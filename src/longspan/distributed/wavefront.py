"""States of any kind, handed from rank to rank: rank r works on layer l while rank r - 1 works on layer l + 1."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from ..attention.base import Attention
from .collectives import exchanging
from .layout import Layout

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)
AXES = 8  # the most axes of a tensor in a state


def attend(
    attention: Attention, run: Callable[[Tensor, Any], tuple[Any, ...]], x: Tensor, state: Any, layout: Layout
) -> tuple[Any, ...]:
    """Return ``run(x, state)`` after the state of the rank before, and send the next state on.

    Args:
        attention: The attention, which makes the state before a sequence.
        run: Its ``attend``.
        x: (B,N,dim) the tokens of this shard.
        state: The state before the whole row, or None.
        layout: The shards.

    Returns:
        The outputs (B,N,dim), and the state after this shard if one was given.
    """
    before = attention.init_trainable_state(x.shape[0]) if state is None else state
    if layout.rank:
        x, before = _receive(attention, x, before, layout)
    y, after, *_ = run(x, before)
    if layout.rank + 1 < layout.size:
        y = _send(y, after, layout)
    return y, None if state is None else after


def _receive(attention: Attention, x: Tensor, like: Any, layout: Layout) -> tuple[Tensor, Any]:
    leaves, tree = pytree.tree_flatten(like)
    source = dist.get_global_rank(layout.group, layout.rank - 1)
    header = torch.empty(len(leaves), 3 + AXES, dtype=torch.long, device=x.device)
    _recv(header, source, layout.group)
    got: list[Tensor] = []
    followed: list[int] = []
    for i, (kind, axes, follows, *sizes) in enumerate(header.tolist()):
        got.append(torch.empty(sizes[:axes], dtype=DTYPES[kind], device=x.device))
        if follows:
            followed.append(i)
        else:
            _recv(got[i], source, layout.group)
    if followed:
        # The anchor lets the backward pass run if the rank before waits for it, whether x needs a gradient or not.
        anchor = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=torch.is_grad_enabled())
        taken: Any = _Take.apply(anchor, x, source, layout.group, *(got[i] for i in followed))
        x = taken[0]
        for i, t in zip(followed, taken[1:], strict=True):
            got[i] = t
    if not layout.plain:
        fresh = pytree.tree_leaves(attention.init_trainable_state(x.shape[0]))
        got = [layout.joined(t, _like(other, t)) for t, other in zip(got, fresh, strict=True)]
    return x, pytree.tree_unflatten(got, tree)


def _send(y: Tensor, after: Any, layout: Layout) -> Tensor:
    leaves = pytree.tree_leaves(after)
    target = dist.get_global_rank(layout.group, layout.rank + 1)
    # Without gradients here, as in frozen layers, the next rank must not send any.
    trained = y.requires_grad or any(t.requires_grad for t in leaves)
    follows = [trained and t.is_floating_point() for t in leaves]
    rows = [
        [DTYPES.index(t.dtype), t.dim(), follow, *t.shape, *[0] * (AXES - t.dim())]
        for t, follow in zip(leaves, follows, strict=True)
    ]
    _sent(torch.tensor(rows, dtype=torch.long, device=y.device), target, layout.group)
    followed = []
    for t, follow in zip(leaves, follows, strict=True):
        if follow:
            followed.append(t)
        else:
            _sent(t, target, layout.group)
    given: Any = _Give.apply(y, target, layout.group, *followed) if followed else y
    return given


def _like(fresh: Tensor, t: Tensor) -> Tensor:
    """Return a fresh part of a state in the size of another: axes that grow with the tokens get zeros."""
    more = [edge for own, size in zip(fresh.shape[::-1], t.shape[::-1], strict=True) for edge in (0, size - own)]
    return F.pad(fresh, more).to(t.dtype) if any(more) else fresh.to(t.dtype)


def _sent(t: Tensor, target: int, group: dist.ProcessGroup) -> None:
    if t.numel():
        t = t.detach().contiguous()
        with exchanging(group, f"rank {target}"):
            dist.send(t.view(torch.uint8) if t.dtype == torch.bool else t, target, group=group)


def _recv(t: Tensor, source: int, group: dist.ProcessGroup) -> None:
    if t.numel():
        with exchanging(group, f"rank {source}"):
            dist.recv(t.view(torch.uint8) if t.dtype == torch.bool else t, source, group=group)


class _Take(torch.autograd.Function):
    """x as it is, and the tensors of the rank before, which gets their gradients in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, source: int, group: dist.ProcessGroup, *like: Tensor
    ) -> tuple[Tensor, ...]:
        for t in like:
            _recv(t, source, group)
        ctx.source, ctx.group = source, group
        return x.view_as(x), *(t.view_as(t) for t in like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for grad in grads[1:]:
            _sent(grad, ctx.source, ctx.group)
        return None, grads[0], None, None, *(None,) * (len(grads) - 1)


class _Give(torch.autograd.Function):
    """y as it is, after sending tensors to the next rank, which returns their gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, target: int, group: dist.ProcessGroup, *state: Tensor) -> Tensor:
        for t in state:
            _sent(t, target, group)
        ctx.target, ctx.group = target, group
        ctx.like = [(t.shape, t.dtype, t.device) for t in state]
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        for t in found:
            _recv(t, ctx.target, ctx.group)
        return grads[0], None, None, *found
