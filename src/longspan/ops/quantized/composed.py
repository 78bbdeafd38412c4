"""The quantized linear map in torch: by its definition, and by blocks of rows of the weight."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..tensors import upcast_half
from .operands import ACTIVATIONS, TINY, Map
from .packing import GROUP, Packed, rows

ELEMENTS = 1 << 18  # numbers of a weight that are held at a time


def rounded(x: Tensor, activations: str) -> tuple[Tensor, Tensor]:
    """Round activations (...,K) -> integers and scales, (...,K) each, whose products replace them."""
    limit = ACTIVATIONS[activations]
    blocks = x.unflatten(-1, (-1, 32))
    size = blocks.abs().amax(-1, keepdim=True)
    finite, some = blocks.isfinite().all(-1, keepdim=True), size >= TINY
    keep = finite & some
    q = torch.where(keep, (blocks * (torch.full_like(size, limit) / size)).round(), 0.0)
    scale = torch.where(keep, size / limit, 0.0).masked_fill(~finite, torch.nan)
    return q.flatten(-2), scale.expand_as(q).flatten(-2)


def rounded_values(x: Tensor, activations: str) -> Tensor:
    """The numbers (...,K) that products read in place of activations (...,K) of a wide dtype."""
    if not ACTIVATIONS[activations]:
        return x
    q, scale = rounded(x, activations)
    return q * scale


def reference(r: Map) -> Tensor:
    """The definition: float64 products of rounded activations with the dequantized weight."""
    x, weight = upcast_half(r.x), rows(r.weight, 0, r.outputs).double()
    if ACTIVATIONS[r.activations]:
        q, scale = rounded(x, r.activations)
        exact = q.double() * scale.double()
    else:
        exact = x.double()
    y = exact @ weight.mT
    return (y if r.bias is None else y + r.bias.double()).to(r.x.dtype)


def attend(r: Map) -> Tensor:
    """Products with a few dequantized rows of the weight at a time, in x's dtype, float32 at least."""
    x = upcast_half(r.x)
    if ACTIVATIONS[r.activations]:
        # The gradient passes the rounding as if there were none.
        x = x + (rounded_values(x.detach(), r.activations) - x.detach())
    y = torch.cat([x @ part.to(x.dtype).mT for _, part in parts(r.weight)], -1)
    return (y if r.bias is None else y + r.bias).to(r.x.dtype)


def transposed(grad: Tensor, weight: Packed, read: Callable[[Packed, int, int], Tensor] = rows) -> Tensor:
    """The gradient (...,N) of the output times the weight -> (...,K), in float32 at least.

    Args:
        grad: The gradient.
        weight: The weight.
        read: ``packing.rows``, or a kernel that does the same.
    """
    wide = upcast_half(grad).flatten(0, -2)
    total = wide.new_zeros(len(wide), weight.inputs)
    for begin, part in parts(weight, read):
        total = total.addmm_(wide[:, begin : begin + len(part)], part.to(wide.dtype))
    return total.view(*grad.shape[:-1], weight.inputs)


def parts(weight: Packed, read: Callable[[Packed, int, int], Tensor] = rows) -> Iterator[tuple[int, Tensor]]:
    """Dequantize the rows of a weight part by part: the first row and the rows of each."""
    height = max(ELEMENTS // max(weight.inputs, 1) // GROUP, 1) * GROUP
    for begin in range(0, max(weight.outputs, 1), height):
        yield begin, read(weight, begin, min(begin + height, weight.outputs))
