"""Heads side by side, as projections make them, and apart, as attention needs them."""

from torch import Tensor


def split(x: Tensor, heads: int) -> Tensor:
    """(B,N,H*D) -> (B,H,N,D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B,H,N,D) -> (B,N,H*D)."""
    return x.transpose(1, 2).flatten(-2)
