"""Softmax attention under a pattern whose log-sums have gradients, as learned sinks need it."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...patterns import Pattern
from . import blockwise


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float, layer: int = 0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As ``blockwise.attend``, with a gradient of the log-sums: q (B,H,N,D), k, v (B,G,M,.) -> (B,H,N,E), (B,H,N)."""
    with torch.no_grad():
        out, lse = blockwise.attend(q, k, v, pattern, layer=layer, scale=scale, softcap=softcap)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (q, k, v)):
        return out, lse
    pair = _Attend.apply(q, k, v, out, lse, pattern, layer, scale, softcap)
    return cast(tuple[Tensor, Tensor], pair)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Attention (B,H,N,E) with one more key for each head, whose logit is ``sink`` (H,) and whose value is 0.

    The softmax over M keys has the sum e^lse, so that with the sink all weights shrink by e^lse / (e^lse + e^sink).

    Source: Xiao et al. 2023 (2309.17453), section 3.3, learned sinks.
    """
    return out * torch.sigmoid(lse - sink.to(lse.dtype)[:, None])[..., None].to(out.dtype)


class _Attend(torch.autograd.Function):
    """Hands on what has been computed, and adds the log-sums' gradient to that of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        pattern: Pattern,
        layer: int,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = pattern, {"layer": layer, "scale": scale, "softcap": softcap}
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (one gradient for each output)
        ctx: Any, grad: Tensor, grad_sums: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        pattern, options = ctx.options
        # The gradient of logit ij is p_ij (grad_i . v_j - grad_i . out_i + grad_sums_i). One more channel, 0 in v and 1
        # in out, brings the last term in.
        grad = torch.cat([grad, -grad_sums[..., None].to(grad.dtype)], -1)
        out, wider = F.pad(out, (0, 1), value=1.0), F.pad(v, (0, 1))
        dq, dk, dv = blockwise.backward(grad, q, k, wider, out, lse, pattern, **options)
        return dq, dk, dv[..., :-1], None, None, None, None, None, None
