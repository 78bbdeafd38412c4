"""Random tensors, comparisons, and the layouts of heads."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from longspan import backend


def data(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def split_heads(x: Tensor, heads: int = 2) -> Tensor:
    """(B,N,H D) -> (B,H,N,D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B,H,N,D) -> (B,N,H D)."""
    return x.transpose(1, 2).flatten(-2)


def same(found: Tensor, expected: Tensor, leaves: Iterable[Tensor], tolerance: float = 1e-10) -> None:
    """Equal outputs, and equal gradients of the leaves from fixed ones of the outputs."""
    close(found, expected, tolerance)
    upstream, wanted = data(*found.shape, seed=1), list(leaves)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    for a, b in zip(*(torch.autograd.grad(y, wanted, upstream, **options) for y in (found, expected)), strict=True):
        close(a, b, tolerance)


def kernels_agree(
    call: Callable[..., Tensor],
    operands: Sequence[Tensor],
    outputs: float,
    gradients: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The native form in this dtype has the outputs and the gradients of the form in torch in float64."""
    found = []
    for form, width in (("torch", torch.float64), ("native", dtype)):
        leaves = [t.detach().to(dtype).to(width).requires_grad_() for t in operands]
        with backend(form):
            y = call(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, data(*y.shape, seed=4).to(dtype).to(width))])
    close(found[1][0].double(), found[0][0], outputs)
    for a, b in zip(found[1][1:], found[0][1:], strict=True):
        close(a.double(), b, gradients)
