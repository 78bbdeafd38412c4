"""The Set Transformer's blocks: attention among the elements of a set, whose order plays no part."""

import torch
from torch import Tensor, nn

from ..ops.arguments import check_mask
from ..ops.softmax import dense
from ..ops.tensors import merge, split
from .norms import norm as layer_norm


class MAB(nn.Module):
    r"""Multihead attention block: the elements of x read those of y.

    $$
    \mathrm{MAB}(X, Y) = \mathrm{norm}(H + \mathrm{relu}(W H + b)), \quad
    H = \mathrm{norm}(X + \mathrm{attend}(X, Y, Y))
    $$

    >>> import torch, longspan
    >>> block = longspan.MAB(8, 2)
    >>> block(torch.randn(1, 3, 8), torch.randn(1, 50, 8)).shape
    torch.Size([1, 3, 8])

    x (B,N,dim), y (B,M,dim), mask (B,M) bool, True on real elements of y -> (B,N,dim). A masked element does not exist,
    whatever it holds; where y has no real one, x reads zeros. attend is softmax attention with ``heads`` heads, scores
    scaled by the head's size and not by ``dim``, and an output projection. ``norm``: layer normalisation; without it,
    norm is left out.

    Source: Lee et al. 2019 (1810.00825), eqs 6 and 7; one layer with relu as its row-wise network. Raises ValueError
    where heads do not divide dim, and for sets or masks of another shape.
    """

    def __init__(self, dim: int, heads: int, *, norm: bool = True):
        super().__init__()
        if dim < 1 or heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} is not a multiple of heads={heads}")
        self.dim, self.heads = dim, heads
        self.query, self.key, self.value, self.out, self.row = (nn.Linear(dim, dim) for _ in range(5))
        self.norm1, self.norm2 = (layer_norm("layer", dim) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        _check("x", x, self.dim, None)
        y, seen = _real("y", y, self.dim, mask)
        q, k, v = split(self.query(x), self.heads), split(self.key(y), self.heads), split(self.value(y), self.heads)
        h = self.norm1(x + self.out(merge(dense.attend(q, k, v, mask=seen))))
        return self.norm2(h + self.row(h).relu())


class SAB(nn.Module):
    """Set attention block: every element reads every other one, MAB(X, X), in O(N^2).

    >>> import torch, longspan
    >>> longspan.SAB(8, 2)(torch.randn(1, 50, 8)).shape
    torch.Size([1, 50, 8])

    x (B,N,dim), mask (B,N) bool -> (B,N,dim), zeros where the mask has none; reordering the elements reorders the
    outputs. Arguments, and what is raised, as in ``MAB``.

    Source: Lee et al. 2019 (1810.00825), eq. 8.
    """

    def __init__(self, dim: int, heads: int, *, norm: bool = True):
        super().__init__()
        self.block = MAB(dim, heads, norm=norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        x, _ = _real("x", x, self.block.dim, mask)
        return _cleared(self.block(x, x, mask), mask)


class ISAB(nn.Module):
    """Induced set attention block: learned points I read the set, which reads them, MAB(X, MAB(I, X)), in O(N points).

    >>> import torch, longspan
    >>> longspan.ISAB(8, 2, points=4)(torch.randn(1, 50, 8)).shape
    torch.Size([1, 50, 8])

    x (B,N,dim), mask (B,N) bool -> (B,N,dim), zeros where the mask has none; reordering the elements reorders the
    outputs. ``points``: rows of I. Other arguments as in ``MAB``, and raises what that raises, and for points < 1.

    Source: Lee et al. 2019 (1810.00825), eqs 9 and 10.
    """

    def __init__(self, dim: int, heads: int, *, points: int = 32, norm: bool = True):
        super().__init__()
        self.inducing = _learned("points", points, dim)
        self.pack, self.unpack = MAB(dim, heads, norm=norm), MAB(dim, heads, norm=norm)

    def induce(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the points have read: y (B,M,dim), mask (B,M) -> (B,points,dim)."""
        return self.pack(_rows(self.inducing, y), y, mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        x, _ = _real("x", x, self.pack.dim, mask)
        return _cleared(self.unpack(x, self.induce(x, mask)), mask)


class PMA(nn.Module):
    """Pooling by multihead attention: learned seeds S read the set, MAB(S, relu(W X + b)), and are its summary.

    >>> import torch, longspan
    >>> longspan.PMA(8, 2, seeds=3)(torch.randn(1, 50, 8)).shape
    torch.Size([1, 3, 8])

    x (B,N,dim), mask (B,N) bool -> (B,seeds,dim), whatever the order of the elements. ``seeds``: rows of S. Other
    arguments as in ``MAB``, and raises what that raises, and for seeds < 1.

    Source: Lee et al. 2019 (1810.00825), eq. 11.
    """

    def __init__(self, dim: int, heads: int, *, seeds: int = 1, norm: bool = True):
        super().__init__()
        self.seeds = _learned("seeds", seeds, dim)
        self.row, self.block = nn.Linear(dim, dim), MAB(dim, heads, norm=norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        x, _ = _real("x", x, self.block.dim, mask)
        return self.block(_rows(self.seeds, x), self.row(x).relu(), mask)


def _learned(option: str, count: int, dim: int) -> nn.Parameter:
    if count < 1:
        raise ValueError(f"{option}={count} must be at least 1")
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(count, dim)))


def _rows(learned: Tensor, like: Tensor) -> Tensor:
    """The same for each row of a batch, in its dtype: (S,dim) -> (B,S,dim)."""
    # No view of the weights, since torch's counter of operations cannot follow one into a module.
    return learned.to(like.dtype) + like.new_zeros(len(like), 1, 1)


def _real(name: str, x: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x (B,N,dim) with zeros at masked elements, and who may be seen, bool (B,1,1,N)."""
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
