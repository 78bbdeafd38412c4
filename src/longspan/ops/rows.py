"""Rows whose real tokens stand side by side, so that an index says how far two tokens are apart."""

import torch
from torch import Tensor


def together(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each (B,N,...) with the real tokens of a row first, in their order, and the others after them; mask (B,N)."""
    if mask is None:
        return tensors
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return tuple(pick(x, order) for x in tensors)


def back(mask: Tensor | None, x: Tensor) -> Tensor:
    """x (B,N,...), in the order of ``together``, in that of the call again; what masked tokens get means nothing."""
    return x if mask is None else pick(x, rank(mask))


def rank(mask: Tensor) -> Tensor:
    """Where ``together`` has put each real token: mask (B,N) -> (B,N), never negative."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def ending(tokens: Tensor, mask: Tensor | None, slots: int) -> Tensor:
    """The last ``slots`` tokens of each row: tokens (B,slots+N,...), those of earlier calls before new ones together.

    -> (B,slots,...), which shares no memory with ``tokens``.
    """
    n = tokens.shape[1] - slots
    if mask is None:
        return tokens[:, n:].clone()
    return pick(tokens, mask.sum(1, keepdim=True) + torch.arange(slots, device=tokens.device))


def pick(x: Tensor, tokens: Tensor) -> Tensor:
    """Row by row the tokens of these numbers: x (B,N,...), tokens (B,M) -> (B,M,...)."""
    places = tokens.view(*tokens.shape, *(1,) * (x.dim() - 2))
    return x.gather(1, places.expand(-1, -1, *x.shape[2:]))


def spread(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """A matrix (B|1,H,N,S+N) of tokens together as one of the call's own order, 0 in the columns of masked tokens.

    S columns, those of earlier calls, come first and stay.
    """
    if mask is None:
        return matrix
    (batch, n), old, at = mask.shape, matrix.shape[-1] - mask.shape[1], rank(mask)
    matrix = matrix.expand(batch, -1, -1, -1)
    columns = torch.cat([torch.arange(old, device=at.device).expand(batch, -1), old + at], 1)
    matrix = matrix.gather(2, at[:, None, :, None].expand(-1, matrix.shape[1], -1, old + n))
    matrix = matrix.gather(3, columns[:, None, None].expand(-1, *matrix.shape[1:3], -1))
    kept = torch.nn.functional.pad(mask, (old, 0), value=True)
    return matrix.masked_fill(~kept[:, None, None], 0)
