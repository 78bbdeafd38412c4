"""Softmax attention over the keys that a mask allows."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import select_backend
from ..operands import materialize_neg, transformed, with_higher_derivatives


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v over the allowed keys.

    Args:
        q: (B,H,N,D).
        k: (B,G,M,D), where G divides H: each key head is shared by H/G query heads.
        v: (B,G,M,E).
        mask: Bool, broadcast to (B,H,N,M), True = may be seen.
        causal: Allows keys j <= i; requires N = M and no mask.
        dropout: The probability of dropping a weight.

    Returns:
        (B,H,N,E); 0 for a query without allowed keys.

    References:
        Vaswani et al. 2017 (1706.03762), eq. 1; Ainslie et al. 2023 (2305.13245) for G < H.
    """
    q, k, v = materialize_neg(q, k, v)
    # Fused kernels have no forward-mode derivatives.
    if select_backend("softmax attention") == "reference" or transformed():
        return _plain(causal, q, k, v, mask, dropout)
    if q.shape[2] == 1 and mask is None and dropout == 0:
        return _one_query(q, k, v)
    o = _fused(q, k, v, mask, causal, dropout)
    if dropout == 0 and o.requires_grad and not torch.compiler.is_compiling():
        # torch's fused kernels have first derivatives only.
        o = with_higher_derivatives(o, partial(_plain, causal), q, k, v, mask)
    return o


def _plain(causal: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    return F.dropout(weights(q, k, mask=mask, causal=causal)[0], dropout) @ repeat(v, q.shape[1])


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    if mask is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
    # The fused kernels disagree on rows without keys, so such rows see all keys and are cleared afterwards.
    blind = ~mask.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask | blind, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.masked_fill(blind, 0.0)


def weights(q: Tensor, k: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return the attention matrix (B,H,N,M) and the log-sum-exp of each row (B,H,N), -inf for a row without keys.

    Arguments as in ``attend``. O(N M) memory: the definition, for tests and pictures.
    """
    logits = q @ repeat(k, q.shape[1]).mT * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return logits.softmax(-1), logits.logsumexp(-1)
    p = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1) * mask
    return p, logits.masked_fill(~mask, -torch.inf).logsumexp(-1)


def repeat(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads to match the query heads: (B,G,M,D) -> (B,heads,M,D)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A decode step: query heads that share a key head become rows of one small product."""
    batch, heads, _, dim = q.shape
    rows = q.reshape(batch, k.shape[1], heads // k.shape[1], dim) * dim**-0.5
    p = (rows @ k.mT).softmax(-1)
    return (p @ v).reshape(batch, heads, 1, v.shape[-1])
