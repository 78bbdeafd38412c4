"""The scans in an exported program: one operation each for any batch and length, which chooses its form at run time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operands import double_backward

Scan = Callable[..., tuple[Tensor, Tensor]]


def diagonal_operation(again: Scan) -> Any:
    """Register ``torch.ops.longspan.diagonal_scan``, which computes ``again`` under torch.export.

    A process that runs an exported program must import longspan. The backward pass runs the forward form again.
    """

    def run(
        x: Tensor,
        log_decay: Tensor,
        state: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return _copied(again(x, log_decay, state, mask, segments, cu_seqlens))

    def shapes(
        x: Tensor,
        log_decay: Tensor,
        state: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return _like(x), _like(state)

    return _registered("longspan::diagonal_scan", run, shapes, again, 3)


def selective_operation(again: Scan) -> Any:
    """Register ``torch.ops.longspan.selective_scan``, like ``diagonal_operation``."""

    def run(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        state: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        cu_seqlens: Tensor | None,
        softplus: bool,
    ) -> tuple[Tensor, Tensor]:
        return _copied(again(x, dt, A, B, C, D, z, dt_bias, state, mask, segments, cu_seqlens, softplus))

    def shapes(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        state: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        cu_seqlens: Tensor | None,
        softplus: bool,
    ) -> tuple[Tensor, Tensor]:
        return _like(x), _like(state)

    return _registered("longspan::selective_scan", run, shapes, again, 9)


def _registered(name: str, run: Any, shapes: Any, again: Scan, count: int) -> Any:
    """``count``: how many of the arguments may have gradients."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = tuple(t for t in inputs if isinstance(t, bool))
        ctx.save_for_backward(*inputs[: len(inputs) - len(ctx.rest)])

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, fixed = saved[:count], (*saved[count:], *ctx.rest)
        if torch.is_grad_enabled():
            found = double_backward(lambda *given: again(*given, *fixed), inputs, grads)
        else:
            given = [t if t is None else t.detach().requires_grad_() for t in inputs]
            with torch.enable_grad():
                outputs = again(*given, *fixed)
            made = iter(torch.autograd.grad(outputs, [t for t in given if t is not None], grads))
            found = [None if t is None else next(made) for t in inputs]
        return *found, *([None] * len(fixed))

    made: Any = torch.library.custom_op(name, run, mutates_args=())
    made.register_fake(shapes)
    made.register_autograd(gradients, setup_context=keep)
    return made


def _copied(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    # The result of an operation may not be one of its operands.
    return found[0].clone(memory_format=torch.contiguous_format), found[1].clone(memory_format=torch.contiguous_format)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
