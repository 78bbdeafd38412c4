"""Sums over keys for linear attention: those of a context, of one call, or of all tokens so far."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.linear import stabilized
from ..ops.prefix import join
from ..ops.tensors import visible


class ContextSums(NamedTuple):
    """Everything that queries need from a context, at any length."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T; last column: sum of phi(k)


class Form(NamedTuple):
    """An op with its options, on queries q and keys k in the form that it accepts, and v (B,H,M,E).

    ``attend`` and ``matrix`` get ``causal``, ``mask``, ``segments``, ``prefix`` and the state ``before`` by name; for a
    context only the first two.
    """

    attend: Callable[..., tuple[Tensor, Any]]  # (q, k, v, donate=, ...) -> (B,H,N,E), the state after
    matrix: Callable[..., Tensor]  # (q, k, allowed, ...) -> the weights (B,H,N,M) of this call's keys
    read: Callable[[Any, Tensor], Tensor]  # (q, sums) -> (B,H,N,E), the output of q for sums over all keys


def stable(state: Callable[[stabilized.Sums], Any], eps: float) -> Form:
    """Return the form for features that may overflow or change sign; ``state`` converts the op's state."""

    def sums(before: Any) -> stabilized.Sums | None:
        return None if before is None else stabilized.Sums(before.sums, getattr(before, "peak", None))

    def attend(q: Any, k: Any, v: Tensor, *, before: Any = None, **options: Any) -> tuple[Tensor, Any]:
        o, after = stabilized.attend(q, k, v, state=sums(before), eps=eps, **options)
        return o, state(after)

    def matrix(q: Any, k: Any, allowed: Tensor, *, before: Any = None, **options: Any) -> Tensor:
        return stabilized.matrix(q, k, allowed, state=sums(before), eps=eps, **options)

    return Form(attend, matrix, lambda q, found: stabilized.read(q, found, eps=eps))


def attend(
    form: Form,
    q: Any,
    project: Callable[[Tensor], tuple[Any, Tensor]],
    x: Tensor,
    state: Any,
    *,
    causal: bool,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
    context: Tensor | None = None,
    context_mask: Tensor | None = None,
    record: dict[str, Any] | None = None,
    donate: bool = False,
) -> tuple[Tensor, Any]:
    """Attend from the queries of x to x itself, or to a context that is passed now or kept in the state.

    Args:
        form: The op.
        q: The queries of x.
        project: Maps x (B,N,dim) or the context (B,M,context_dim) to keys and values (B,H,M,E).
        x: (B,N,dim) input.
        state: The state before these tokens, or None.
        record: Gets ``mask`` and ``matrix``.

    The other arguments are those of ``Attention.forward``.

    Returns:
        The output (B,H,N,E) and the next state.
    """
    if isinstance(state, ContextSums):
        return form.read(q, state.sums).to(x.dtype), state
    k, v = project(x if context is None else context)
    if context is not None:
        options: dict[str, Any] = {"causal": False, "mask": context_mask}
    else:
        options = {"causal": causal, "mask": mask, "segments": segments, "prefix": prefix, "before": state}
    if record is not None:
        if context is not None:
            allowed = across(x, context, context_mask)
        else:
            allowed = visible(x, causal=causal, mask=mask, segments=segments)
            allowed = allowed if prefix is None else join(allowed, prefix)
        record.update(mask=allowed, matrix=form.matrix(q, k, allowed, **options))
    o, after = form.attend(q, k, v, donate=donate, **options)
    if context is not None:
        return o, ContextSums(after.sums)
    return o, None if state is None else after


def across(x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
    """Return which tokens of a context x may see: (B,N,.), (B,M,.), mask (B,M) -> bool (B|1,1,N,M)."""
    allowed = torch.ones(1, 1, x.shape[1], context.shape[1], dtype=torch.bool, device=x.device)
    return allowed if mask is None else allowed & mask[:, None, None, :]
