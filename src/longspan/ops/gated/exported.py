"""The recurrence in an exported program: one operation, of any batch and length, that chooses its form when it runs."""

from typing import Any

import torch
from torch import Tensor

from ..operands import gradients_again


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float,
    normalise: bool,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ``gated.recur``, while ``torch.export`` traces: the program has ``torch.ops.longspan.recurrence`` in it.

    A process that runs such a program imports longspan. Gradients are those of the form that runs, which the backward
    runs once more.
    """
    return operation(q, k, v, log_decay, beta, state, mask, segments, cu_seqlens, scale, normalise)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    out, end = _recur(q, k, v, log_decay, beta, state, mask, segments, cu_seqlens, scale, normalise)
    return out.contiguous(), end.contiguous()


def _recur(q, k, v, log_decay, beta, state, mask, segments, cu_seqlens, scale, normalise):
    # Not at the top: that module needs this one.
    from . import recur

    return recur(
        q, k, v, log_decay=log_decay, beta=beta, scale=scale, normalise="l2" if normalise else None, mask=mask,
        segments=segments, cu_seqlens=cu_seqlens, state=state,
    )  # fmt: skip


operation = torch.library.custom_op("longspan::recurrence", _run, mutates_args=())


@operation.register_fake
def _(q, k, v, log_decay, beta, state, mask, segments, cu_seqlens, scale, normalise):
    return _like(v), _like(state)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple, output: Any) -> None:
    *tensors, ctx.scale, ctx.normalise = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor, grad_end: Tensor) -> tuple:
    # Not an operation itself: inside of one, autograd would not follow the forward that is run again.
    *inputs, mask, segments, cu_seqlens = ctx.saved_tensors
    fixed = (mask, segments, cu_seqlens, ctx.scale, ctx.normalise)
    if torch.is_grad_enabled():
        found = gradients_again(lambda *given: _recur(*given, *fixed), inputs, (grad, grad_end))
    else:
        given = [t if t is None else t.detach().requires_grad_() for t in inputs]
        with torch.enable_grad():
            outputs = _recur(*given, *fixed)
        grads = iter(torch.autograd.grad(outputs, [t for t in given if t is not None], (grad, grad_end)))
        found = [None if t is None else next(grads) for t in inputs]
    return *found, *([None] * 5)


operation.register_autograd(_gradients, setup_context=_keep)
