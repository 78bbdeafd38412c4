"""Softmax attention under a pattern with a gradient of the log-sum-exps, for learned sinks."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...patterns import Pattern
from . import blockwise


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float, layer: int = 0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``blockwise.attend`` with a gradient of the log-sum-exps; same arguments and results."""
    with torch.no_grad():
        out, lse = blockwise.attend(q, k, v, pattern, layer=layer, scale=scale, softcap=softcap)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (q, k, v)):
        return out, lse
    pair = _Attend.apply(q, k, v, out, lse, pattern, {"layer": layer, "scale": scale, "softcap": softcap})
    return cast(tuple[Tensor, Tensor], pair)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Add a learned sink to attention: one more key for each head, with logit ``sink`` and value 0.

    The weights of the M keys shrink by exp(lse) / (exp(lse) + exp(sink)).

    Args:
        out: (B,H,N,E) output without the sink.
        lse: (B,H,N) log-sum-exp of each row.
        sink: (H,) logits of the sinks.

    Returns:
        The output (B,H,N,E).

    References:
        Xiao et al. 2023 (2309.17453), section 3.3, learned sinks.
    """
    return out * torch.sigmoid(lse - sink.to(lse.dtype)[:, None])[..., None].to(out.dtype)


class _Attend(torch.autograd.Function):
    """Returns ``out`` and ``lse`` unchanged, and adds the gradient of ``lse`` to that of the logits."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Pattern, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pattern, ctx.options = pattern, options
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (one gradient for each output)
        ctx: Any, grad: Tensor, grad_sums: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # The gradient of logit ij is p_ij (grad_i . v_j - grad_i . out_i + grad_sums_i). One more channel, 0 in v and 1
        # in out, adds the last term.
        grad = torch.cat([grad, -grad_sums[..., None].to(grad.dtype)], -1)
        out, wider = F.pad(out, (0, 1), value=1.0), F.pad(v, (0, 1))
        dq, dk, dv = blockwise.backward(grad, q, k, wider, out, lse, ctx.pattern, **ctx.options)
        return dq, dk, dv[..., :-1], None, None, None, None
