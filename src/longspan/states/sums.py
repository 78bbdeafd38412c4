"""Sums over keys, and how queries come to read them: those of a context, of one call, or of all tokens so far."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.linear import stabilised
from ..ops.prefix import join
from ..ops.tensors import visible


class ContextSums(NamedTuple):
    """All that queries need of a context, whatever its length."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T; last column: sum of phi(k)


class Form(NamedTuple):
    """How a mechanism sums: an op with its options, on queries q and keys k as that op takes them, v (B,H,M,E).

    ``attend`` and ``matrix`` get ``causal, mask, segments, prefix`` and the state ``before`` by name; of a context the
    first two alone.
    """

    attend: Callable[..., tuple[Tensor, Any]]  # (q, k, v, donate=, ...) -> (B,H,N,E), the state after
    matrix: Callable[..., Tensor]  # (q, k, allowed, ...) -> the weights (B,H,N,M) of this call's keys
    read: Callable[[Any, Tensor], Tensor]  # (q, sums) -> (B,H,N,E), what q finds in sums over all keys


def stable(state: Callable[[stabilised.Sums], Any], eps: float) -> Form:
    """The form of features that may overflow or change sign; ``state`` makes a mechanism's state of the op's."""

    def sums(before: Any) -> stabilised.Sums | None:
        return None if before is None else stabilised.Sums(before.sums, getattr(before, "peak", None))

    def attend(q: Any, k: Any, v: Tensor, *, before: Any = None, **options: Any) -> tuple[Tensor, Any]:
        o, after = stabilised.attend(q, k, v, state=sums(before), eps=eps, **options)
        return o, state(after)

    def matrix(q: Any, k: Any, allowed: Tensor, *, before: Any = None, **options: Any) -> Tensor:
        return stabilised.matrix(q, k, allowed, state=sums(before), eps=eps, **options)

    return Form(attend, matrix, lambda q, found: stabilised.read(q, found, eps=eps))


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
    """What the queries q of x read, (B,H,N,E), and the state after: of a context, given now or kept, or of x.

    ``project`` makes keys and values (B,H,M,E) of x (B,N,dim) or of the context (B,M,context_dim). ``record`` gets
    ``mask`` and ``matrix``. The rest is as in ``Attention.forward``.
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
    """Which tokens of a context those of x may see: (B,N,.), (B,M,.), mask (B,M) -> bool (B|1,1,N,M)."""
    allowed = torch.ones(1, 1, x.shape[1], context.shape[1], dtype=torch.bool, device=x.device)
    return allowed if mask is None else allowed & mask[:, None, None, :]
