"""The general delta rule in an exported program: one operation for any batch and length, as in ``exported``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operands import double_backward


def operation(recur: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """Register ``torch.ops.longspan.general_recurrence``, which ``general.recur`` calls under torch.export.

    A process that runs an exported program must import longspan. The backward pass runs the forward form again for its
    gradients.
    """

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        read: Tensor,
        erase: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        early: bool,
    ) -> tuple[Tensor, Tensor]:
        out, end = again(q, k, v, read, erase, log_decay, state, mask, segments, cu_seqlens, scale, early)
        return out.contiguous(), end.contiguous()

    def again(*given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, read, erase, log_decay, state, mask, segments, cu_seqlens, scale, early = given
        options: dict[str, Any] = {"read": read, "erase": erase, "log_decay": log_decay, "state": state, "mask": mask}
        options |= {"segments": segments, "cu_seqlens": cu_seqlens, "scale": scale, "read_before_decay": early}
        return recur(q, k, v, **options)

    def shapes(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        read: Tensor,
        erase: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        early: bool,
    ) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (v, state))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.scale, ctx.early = inputs
        ctx.save_for_backward(*tensors)

    def gradients(ctx: Any, grad: Tensor, grad_end: Tensor) -> tuple[Tensor | None, ...]:
        # Not an operation itself: inside one, autograd would not record the second forward pass.
        *inputs, mask, segments, cu_seqlens = ctx.saved_tensors
        fixed = (mask, segments, cu_seqlens, ctx.scale, ctx.early)
        if torch.is_grad_enabled():
            found = double_backward(lambda *given: again(*given, *fixed), inputs, (grad, grad_end))
        else:
            given = [t if t is None else t.detach().requires_grad_() for t in inputs]
            with torch.enable_grad():
                outputs = again(*given, *fixed)
            grads = iter(torch.autograd.grad(outputs, [t for t in given if t is not None], (grad, grad_end)))
            found = [None if t is None else next(grads) for t in inputs]
        return *found, *([None] * 5)

    made = torch.library.custom_op("longspan::general_recurrence", run, mutates_args=())
    made.register_fake(shapes)
    made.register_autograd(gradients, setup_context=keep)
    return made
