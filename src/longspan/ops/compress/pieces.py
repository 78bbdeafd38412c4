"""Packed sequences as rows of their own, for what is more than attention from token to token."""

from collections.abc import Callable

import torch
from torch import Tensor


def by_pieces(
    x: Tensor, run: Callable[[Tensor, Tensor], Tensor], mask: Tensor | None, segments: Tensor
) -> tuple[Tensor, int]:
    """``run`` on each packed sequence's real tokens alone, and how many such pieces there are.

    x (B,N,dim), mask (B,N) bool, segments (B,N) int64 -> (B,N,dim), zeros at masked tokens. Pieces are numbered row by
    row; ``run`` gets several of one length, tokens (S,L,dim) and the pieces' numbers (S,) int64 -> (S,L,dim).
    """
    batch, n = x.shape[:2]
    real = torch.ones(batch, n, dtype=torch.bool, device=x.device) if mask is None else mask
    token = real.flatten().nonzero()[:, 0]  # (T,) real tokens, row by row
    flat, ids = x.flatten(0, 1), segments.flatten()[token]
    new = torch.ones_like(token, dtype=torch.bool)
    new[1:] = (token[1:] // n != token[:-1] // n) | (ids[1:] != ids[:-1])
    starts = new.nonzero()[:, 0]
    sizes = torch.diff(starts, append=starts.new_tensor([len(token)]))
    out = torch.zeros_like(flat)
    for length in sizes.unique().tolist():
        number = (sizes == length).nonzero()[:, 0]
        place = token[starts[number, None] + torch.arange(length, device=x.device)]  # (S,length)
        out = out.index_put((place,), run(flat[place], number).to(out.dtype))
    return out.unflatten(0, (batch, n)), len(starts)
