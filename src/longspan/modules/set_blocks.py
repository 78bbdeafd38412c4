"""The blocks of the Set Transformer: attention among the elements of a set, independent of their order."""

import torch
from torch import Tensor, nn

from ..ops.arguments import check_mask
from ..ops.softmax import dense
from ..ops.tensors import merge, split
from .norms import norm as layer_norm


class MAB(nn.Module):
    r"""Multihead attention block: the elements of x attend to those of y.

    $$
    \mathrm{MAB}(X, Y) = \mathrm{norm}(H + \mathrm{relu}(W H + b)), \quad
    H = \mathrm{norm}(X + \mathrm{attend}(X, Y, Y))
    $$

    Here attend is softmax attention with an output projection, and scores are scaled by the head dimension.

    Args:
        dim: Width of the elements.
        heads: Attention heads; must divide ``dim``.
        norm: Apply layer normalization.

    Raises:
        ValueError: If heads do not divide dim.

    Example:
        >>> import torch, longspan
        >>> block = longspan.MAB(8, 2)
        >>> block(torch.randn(1, 3, 8), torch.randn(1, 50, 8)).shape
        torch.Size([1, 3, 8])

    References:
        Lee et al. 2019 (1810.00825), eqs 6 and 7, with one relu layer as row-wise network.
    """

    def __init__(self, dim: int, heads: int, *, norm: bool = True):
        super().__init__()
        if dim < 1 or heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} is not a multiple of heads={heads}")
        self.dim, self.heads = dim, heads
        self.query, self.key, self.value, self.out, self.row = (nn.Linear(dim, dim) for _ in range(5))
        self.norm1, self.norm2 = (layer_norm("layer", dim) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from x to y.

        Args:
            x: (B,N,dim).
            y: (B,M,dim).
            mask: (B,M) bool, True on real elements of y. If a row has no real element, the attention returns zeros.

        Returns:
            (B,N,dim).

        Raises:
            ValueError: For sets or masks of another shape.
        """
        _check("x", x, self.dim, None)
        y, seen = _real("y", y, self.dim, mask)
        q, k, v = split(self.query(x), self.heads), split(self.key(y), self.heads), split(self.value(y), self.heads)
        h = self.norm1(x + self.out(merge(dense.attend(q, k, v, mask=seen))))
        return self.norm2(h + self.row(h).relu())


class SAB(nn.Module):
    """Set attention block: every element attends to every element, MAB(X, X), in O(N^2).

    Permuting the elements permutes the outputs. Arguments and errors are those of ``MAB``.

    Example:
        >>> import torch, longspan
        >>> longspan.SAB(8, 2)(torch.randn(1, 50, 8)).shape
        torch.Size([1, 50, 8])

    References:
        Lee et al. 2019 (1810.00825), eq. 8.
    """

    def __init__(self, dim: int, heads: int, *, norm: bool = True):
        super().__init__()
        self.block = MAB(dim, heads, norm=norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B,N,dim), mask (B,N) bool -> (B,N,dim), zeros on masked elements."""
        x, _ = _real("x", x, self.block.dim, mask)
        return _cleared(self.block(x, x, mask), mask)


class ISAB(nn.Module):
    """Induced set attention block: MAB(X, MAB(I, X)) with learned points I, in O(N points).

    Permuting the elements permutes the outputs.

    Args:
        dim: Width of the elements.
        heads: Attention heads; must divide ``dim``.
        points: Number of learned points.
        norm: Apply layer normalization.

    Raises:
        ValueError: If heads do not divide dim, and for points < 1.

    Example:
        >>> import torch, longspan
        >>> longspan.ISAB(8, 2, points=4)(torch.randn(1, 50, 8)).shape
        torch.Size([1, 50, 8])

    References:
        Lee et al. 2019 (1810.00825), eqs 9 and 10.
    """

    def __init__(self, dim: int, heads: int, *, points: int = 32, norm: bool = True):
        super().__init__()
        self.inducing = _learned("points", points, dim)
        self.pack, self.unpack = MAB(dim, heads, norm=norm), MAB(dim, heads, norm=norm)

    def induce(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output of the points for a set: y (B,M,dim), mask (B,M) -> (B,points,dim)."""
        return self.pack(_rows(self.inducing, y), y, mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B,N,dim), mask (B,N) bool -> (B,N,dim), zeros on masked elements."""
        x, _ = _real("x", x, self.pack.dim, mask)
        return _cleared(self.unpack(x, self.induce(x, mask)), mask)


class PMA(nn.Module):
    """Pooling by multihead attention: MAB(S, relu(W X + b)) with learned seeds S.

    The result does not depend on the order of the elements.

    Args:
        dim: Width of the elements.
        heads: Attention heads; must divide ``dim``.
        seeds: Number of learned seeds, which is the number of outputs.
        norm: Apply layer normalization.

    Raises:
        ValueError: If heads do not divide dim, and for seeds < 1.

    Example:
        >>> import torch, longspan
        >>> longspan.PMA(8, 2, seeds=3)(torch.randn(1, 50, 8)).shape
        torch.Size([1, 3, 8])

    References:
        Lee et al. 2019 (1810.00825), eq. 11.
    """

    def __init__(self, dim: int, heads: int, *, seeds: int = 1, norm: bool = True):
        super().__init__()
        self.seeds = _learned("seeds", seeds, dim)
        self.row, self.block = nn.Linear(dim, dim), MAB(dim, heads, norm=norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B,N,dim), mask (B,N) bool -> (B,seeds,dim)."""
        x, _ = _real("x", x, self.block.dim, mask)
        return self.block(_rows(self.seeds, x), self.row(x).relu(), mask)


def _learned(option: str, count: int, dim: int) -> nn.Parameter:
    if count < 1:
        raise ValueError(f"{option}={count} must be at least 1")
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(count, dim)))


def _rows(learned: Tensor, like: Tensor) -> Tensor:
    """Repeat learned rows for a batch, in its dtype: (S,dim) -> (B,S,dim)."""
    # Not a view of the weights, since torch's FLOP counter cannot follow a view into a module.
    return learned.to(like.dtype) + like.new_zeros(len(like), 1, 1)


def _real(name: str, x: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x (B,N,dim) with zeros at masked elements, and the visible elements, bool (B,1,1,N)."""
    _check(name, x, dim, mask)
    if mask is None:
        return x, None
    return x.masked_fill(~mask[..., None], 0.0), mask[:, None, None]


def _cleared(y: Tensor, mask: Tensor | None) -> Tensor:
    return y if mask is None else y.masked_fill(~mask[..., None], 0.0)


def _check(name: str, x: Tensor, dim: int, mask: Tensor | None) -> None:
    if x.dim() != 3 or x.shape[-1] != dim or not x.is_floating_point():
        raise ValueError(f"{name} must be floating-point (B, N, {dim}), not {x.dtype} {tuple(x.shape)}")
    if mask is not None:
        check_mask("mask", mask, tuple(x.shape[:2]), kept="real elements")
