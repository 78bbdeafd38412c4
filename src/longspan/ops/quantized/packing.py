"""Weights in blocks, in the order in which kernels read them: groups of 16 rows, whose blocks are interleaved.

It is the order of native/quantized/product.h, on any processor. Nothing is rounded, and hardly any memory is added.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import FORMATS, Blocks, check_blocks, dequantize, split_factors

BYTES = 1 << 20  # of blocks that are put in order together
GROUP, SUPER = 16, 8  # rows of a group; blocks of 32 that share the float16 factors of Q4_K and Q6_K
PACKED = {
    "Q8_0": 8,
    "Q4_0": 4,
    "Q4_K": 4,
    "Q6_K": 6,
}  # chunks of 4 inputs per block of 32; other formats keep their rows


class Packed(NamedTuple):
    """A weight (N,K) in the order of the kernels; G groups of rows, S blocks of 32 inputs. See ``pack``."""

    quants: Tensor
    """(G,S,chunks,16,4) uint8; (N, bytes per row) of formats without kernels"""
    scales: Tensor
    """(G,S,32) uint8: 16 float16 numbers, or two bytes for each of 16 rows; empty without kernels"""
    factors: Tensor
    """(G,S/8,1 or 2,32) uint8, 16 float16 numbers each, of Q4_K and Q6_K; else empty"""
    format: str
    """a key of ``FORMATS``"""
    outputs: int
    """N"""
    inputs: int
    """K"""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.quants.nbytes + self.scales.nbytes + self.factors.nbytes


def shapes(format: str, outputs: int, inputs: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the tensors of a packed weight."""
    if format not in PACKED:
        return (outputs, FORMATS[format].row_bytes(inputs)), (0,), (0,)
    groups, cells = -(-outputs // GROUP), inputs // 32
    factors = (groups, cells // SUPER, 2 if format == "Q4_K" else 1, 32) if format.endswith("_K") else (0,)
    return (groups, cells, PACKED[format], GROUP, 4), (groups, cells, 32), factors


def pack(blocks: Blocks, release: Callable[[], None] | None = None) -> Packed:
    """Return a weight in the order of the kernels.

    Args:
        blocks: The weight.
        release: Called from time to time, to let the system take back the memory of blocks that were read.

    Raises:
        ValueError: the bytes are not those of whole rows of a known format.
    """
    check_blocks(blocks)
    (data, format, inputs), outputs = blocks, len(blocks.data)
    none = data.new_empty(0)
    if format not in PACKED:
        return Packed(data, none, none, format, outputs, inputs)
    quants, scales, factors = (data.new_empty(shape) for shape in shapes(format, outputs, inputs))
    # A part at a time, since each takes several times its memory meanwhile.
    height = max(BYTES // max(data.shape[1], 1) // GROUP, 1) * GROUP
    for begin in range(0, outputs, height):
        groups = slice(begin // GROUP, (begin + height) // GROUP)
        for whole, part in zip(
            (quants, scales, factors), _ordered(data[begin : begin + height], format, inputs), strict=True
        ):
            if whole.numel():
                whole[groups] = part
        if release is not None:
            release()
    return Packed(quants, scales, factors, format, outputs, inputs)


def _ordered(data: Tensor, format: str, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of blocks -> quants, scales and factors of ``Packed``."""
    form, outputs, factors = FORMATS[format], len(data), data.new_empty(0)
    data = F.pad(data, (0, 0, 0, -outputs % GROUP)).view(-1, GROUP, inputs // form.block, form.size)
    if format == "Q8_0":
        quants, scales = data[..., 2:] ^ 128, data[..., :2]
    elif format == "Q4_0":
        quants, scales = data[..., 2:], data[..., :2]
    elif format == "Q4_K":
        low, high = data[..., 16:].unflatten(-1, (4, 32)) & 15, data[..., 16:].unflatten(-1, (4, 32)) >> 4
        quants = _by_halves(torch.stack([low, high], -2))
        scales = torch.stack(split_factors(data), -1)
        factors = data[..., :4]
    else:
        nibbles, twos = data[..., :128].unflatten(-1, (2, 64)), data[..., 128:192].unflatten(-1, (2, 32))
        quants = _by_halves(torch.stack([nibbles & 15, nibbles >> 4], -2).unflatten(-1, (2, 32)))
        upper = torch.stack([(twos >> shift) & 3 for shift in (0, 2, 4, 6)], -2).unflatten(-1, (2, 4, 4))
        upper = sum((upper[..., c, :] << 2 * c for c in range(1, 4)), upper[..., 0, :])
        quants = torch.cat([quants.flatten(2, -2), upper.flatten(-2).flatten(2, -2)], -1)
        scales = data[..., 192:208].unflatten(-1, (8, 2))
        factors = data[..., 208:]
    (groups, cells, chunks, *_), _, _ = shapes(format, outputs, inputs)
    quants = quants.reshape(groups, GROUP, cells, chunks, 4).permute(0, 2, 3, 1, 4)
    scales = scales.reshape(groups, GROUP, cells, 2)
    # float16 numbers lie together; bytes lie in two halves.
    scales = scales.permute(0, 2, 3, 1) if factors.numel() else scales.transpose(1, 2)
    if factors.numel():
        factors = factors.unflatten(-1, (-1, 2)).permute(0, 2, 3, 1, 4).flatten(-2)
    return quants, scales.reshape(groups, cells, 32), factors


def _by_halves(q: Tensor) -> Tensor:
    """Numbers of four bits (...,32) -> (...,16) bytes with input i in the lower half and i + 16 in the upper half."""
    return q[..., :16] | q[..., 16:] << 4


def rows(weight: Packed, begin: int, end: int) -> Tensor:
    """Return rows of a weight in float32, with the bits of ``formats.dequantize``; ``begin`` is a multiple of 16."""
    if weight.format not in PACKED:
        return dequantize(Blocks(weight.quants[begin:end], weight.format, weight.inputs))
    groups = slice(begin // GROUP, -(-end // GROUP))
    quants = weight.quants[groups].permute(0, 3, 1, 2, 4).flatten(-2)  # (groups,16,S,bytes)
    found = _dequantized(weight, quants, weight.scales[groups], weight.factors[groups])
    return found.reshape(-1, weight.inputs)[: end - begin]


def part(weight: Packed, begin: int, end: int) -> Packed:
    """Return rows of a weight as a view, a packed weight on the same memory; ``begin`` is a multiple of 16."""
    size = GROUP if weight.format in PACKED else 1
    quants, scales, factors = (t[begin // size : -(-end // size)] for t in weight[:3])
    return Packed(quants, scales, factors, weight.format, end - begin, weight.inputs)


def select(weight: Packed, indices: Tensor) -> Tensor:
    """Return the rows (...,K) of a weight at indices (...) in float32."""
    at = indices.flatten()
    if weight.format not in PACKED:
        found = dequantize(Blocks(weight.quants[at], weight.format, weight.inputs))
    else:
        group, row = at // GROUP, at % GROUP
        quants = weight.quants[group, :, :, row].flatten(-2)[:, None]  # (n,1,S,bytes)
        scales = weight.scales[group].unflatten(-1, (-1, GROUP, 2) if not weight.factors.numel() else (2, GROUP, 1))
        scales = scales[torch.arange(len(at), device=at.device), :, :, row].flatten(-2)  # (n,S,2)
        factors = weight.factors[group].unflatten(-1, (GROUP, 2)) if weight.factors.numel() else weight.factors
        factors = factors[torch.arange(len(at), device=at.device), :, :, row] if factors.numel() else factors
        found = _dequantized(weight, quants, scales, factors, 1)
    return found.reshape(*indices.shape, weight.inputs)


def _dequantized(weight: Packed, quants: Tensor, scales: Tensor, factors: Tensor, height: int = GROUP) -> Tensor:
    """quants (n,height,S,bytes) with the scales and factors of these groups -> (n,height,S,32)."""
    if weight.format == "Q8_0":
        return (quants.float() - 128) * scales.contiguous().view(torch.float16).float().transpose(1, 2)[..., None]
    q = torch.cat([quants[..., :16] & 15, quants[..., :16] >> 4], -1)
    if weight.format == "Q4_0":
        return (q.float() - 8) * scales.contiguous().view(torch.float16).float().transpose(1, 2)[..., None]
    small = scales.unflatten(-1, (2, height)).permute(0, 3, 1, 2)  # (n,height,S,2)
    large = (
        factors.contiguous().view(torch.float16).float().permute(0, 3, 1, 2).repeat_interleave(SUPER, 2)
    )  # (n,height,S,1 or 2)
    if weight.format == "Q4_K":
        both = large * small.float()
        return both[..., :1] * q.float() - both[..., 1:]
    upper = (
        quants[..., 16:].unflatten(-1, (2, 1, 4)) >> torch.arange(0, 8, 2, dtype=torch.uint8, device=q.device)[:, None]
    )
    q = q | (upper & 3).flatten(-3) << 4
    scale = (large * small.view(torch.int8).float()).repeat_interleave(16, -1)
    return scale * (q.float() - 32)
