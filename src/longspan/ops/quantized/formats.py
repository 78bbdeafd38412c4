"""Weights in blocks of few bits: the formats of GGUF files, to and from floating-point numbers.

Every row of a weight is cut into blocks of 32 or 256 adjacent inputs, and each block is stored with its own scales.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._utils.spec import known


class Blocks(NamedTuple):
    """A weight (N,K) in blocks."""

    data: Tensor
    """(N, bytes per row) uint8, as in a GGUF file"""
    format: str
    """a key of ``FORMATS``"""
    inputs: int
    """K"""


class Format(NamedTuple):
    """How a block is stored."""

    number: int
    """the type in a GGUF file"""
    block: int
    """weights in a block"""
    size: int
    """bytes in a block"""
    read: Callable[[Tensor], Tensor]
    """blocks (...,size) uint8 -> weights (...,block) float32"""
    write: Callable[[Tensor], Tensor] | None = None
    """weights (...,block) float32 -> blocks; None for formats that are only read"""

    def row_bytes(self, inputs: int) -> int:
        """Return the bytes of a row of weights, whose number is a multiple of ``block``."""
        return inputs // self.block * self.size


def dequantize(blocks: Blocks) -> Tensor:
    """Return the weights (N,K) in float32, with the bits of the ``gguf`` package.

    Raises:
        ValueError: ``check_blocks`` does.
    """
    check_blocks(blocks)
    form = FORMATS[blocks.format]
    return form.read(blocks.data.reshape(len(blocks.data), -1, form.size)).flatten(1)


def quantize(weight: Tensor, format: str) -> Blocks:
    """Round weights to blocks, with the bits of the ``gguf`` package.

    Args:
        weight: (N,K) floating-point, finite.
        format: ``"Q8_0"`` or ``"Q4_0"``.

    Raises:
        ValueError: the format is unknown or cannot be written, K is not a multiple of its block, or weights are not
            finite.
    """
    form = FORMATS[known(format, FORMATS, "format of blocks")]
    if form.write is None:
        written = ", ".join(name for name, one in FORMATS.items() if one.write)
        raise ValueError(f"blocks of {format} are read, not written; choose one of: {written}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"a weight must be floating-point (N, K), not {weight.dtype} {tuple(weight.shape)}")
    outputs, inputs = weight.shape
    _check_inputs(format, inputs)
    wide = weight.detach().float()
    if not wide.isfinite().all():
        raise ValueError("the weight contains infinity or NaN, which blocks cannot hold")
    data = form.write(wide.reshape(outputs, inputs // form.block, form.block))
    return Blocks(data.reshape(outputs, form.row_bytes(inputs)), format, inputs)


def check_blocks(blocks: Blocks) -> None:
    """Raise ValueError unless the bytes are those of whole rows of a known format."""
    form = FORMATS[known(blocks.format, FORMATS, "format of blocks")]
    _check_inputs(blocks.format, blocks.inputs)
    data, width = blocks.data, form.row_bytes(blocks.inputs)
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != width:
        raise ValueError(
            f"{blocks.format} stores {blocks.inputs} inputs in uint8 (N, {width}), not {data.dtype} {tuple(data.shape)}"
        )


def _check_inputs(format: str, inputs: int) -> None:
    if inputs < 0 or inputs % FORMATS[format].block:
        raise ValueError(f"{inputs} inputs are not a multiple of {FORMATS[format].block}, the block of {format}")


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of each block, as float32 (...,1)."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """(...,n) bytes -> (...,2n): all low halves, then all high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _fifth(data: Tensor) -> Tensor:
    """(...,4) bytes -> (...,32): their bits as numbers 0 or 16."""
    return ((data[..., None] >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1).flatten(-2) << 4


def _read_q8_0(b: Tensor) -> Tensor:
    return b[..., 2:].view(torch.int8).float() * _half(b, 0)


def _read_q4_0(b: Tensor) -> Tensor:
    return (_nibbles(b[..., 2:]).float() - 8) * _half(b, 0)


def _read_q4_1(b: Tensor) -> Tensor:
    return _nibbles(b[..., 4:]).float() * _half(b, 0) + _half(b, 2)


def _read_q5_0(b: Tensor) -> Tensor:
    return ((_nibbles(b[..., 6:]) | _fifth(b[..., 2:6])).float() - 16) * _half(b, 0)


def _read_q5_1(b: Tensor) -> Tensor:
    return (_nibbles(b[..., 8:]) | _fifth(b[..., 4:8])).float() * _half(b, 0) + _half(b, 2)


def split_factors(b: Tensor) -> tuple[Tensor, Tensor]:
    """The six-bit factors of scales and of shifts, (...,8) each, from 12 bytes of a block from byte 4 on."""
    low, shifts, high = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], -1)
    return scales, torch.cat([shifts & 63, (high >> 4) | ((shifts >> 2) & 48)], -1)


def _scales_and_shifts(b: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the shifts (...,8,1) of a block."""
    scales, shifts = split_factors(b)
    return (_half(b, 0) * scales.float())[..., None], (_half(b, 2) * shifts.float())[..., None]


def _read_q4_k(b: Tensor) -> Tensor:
    scale, shift = _scales_and_shifts(b)
    q = _nibbles(b[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)  # (...,8,32)
    return (scale * q.float() - shift).flatten(-2)


def _read_q5_k(b: Tensor) -> Tensor:
    scale, shift = _scales_and_shifts(b)
    q = _nibbles(b[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)  # (...,8,32)
    bits = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    q = q | ((b[..., None, 16:48] >> bits) & 1) << 4
    return (scale * q.float() - shift).flatten(-2)


def _read_q6_k(b: Tensor) -> Tensor:
    scale = _half(b, 208) * b[..., 192:208].view(torch.int8).float()  # (...,16)
    low = _nibbles(b[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # (...,2,4,32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)[:, None]
    high = (b[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    q = (low | high << 4).float() - 32
    return (scale[..., None] * q.flatten(-3).unflatten(-1, (16, 16))).flatten(-2)


def _scaled(wide: Tensor, scale: Tensor) -> Tensor:
    """Blocks divided by their scales (...,1), 0 where the scale is too small for a division."""
    # In float64, so that the result does not depend on whether the processor fuses products and sums.
    return wide.double() * (1 / scale).nan_to_num(0.0, 0.0, 0.0).double()


def _write_q8_0(wide: Tensor) -> Tensor:
    scale = wide.abs().amax(-1, keepdim=True) / 127
    x = _scaled(wide, scale).float()
    # Halves are rounded away from zero.
    whole = x.abs().floor()
    q = x.sign() * (whole + (2 * (x.abs() - whole)).floor())
    return torch.cat([scale.half().view(torch.uint8), q.to(torch.int8).view(torch.uint8)], -1)


def _write_q4_0(wide: Tensor) -> Tensor:
    # The weight of the largest size is -8 times the scale, which has its sign.
    scale = wide.gather(-1, wide.abs().argmax(-1, keepdim=True)) / -8
    q = (_scaled(wide, scale) + 8.5).float().trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat([scale.half().view(torch.uint8), q[..., :16] | q[..., 16:] << 4], -1)


FORMATS = {
    "Q4_0": Format(2, 32, 18, _read_q4_0, _write_q4_0),
    "Q4_1": Format(3, 32, 20, _read_q4_1),
    "Q5_0": Format(6, 32, 22, _read_q5_0),
    "Q5_1": Format(7, 32, 24, _read_q5_1),
    "Q8_0": Format(8, 32, 34, _read_q8_0, _write_q8_0),
    "Q4_K": Format(12, 256, 144, _read_q4_k),
    "Q5_K": Format(13, 256, 176, _read_q5_k),
    "Q6_K": Format(14, 256, 210, _read_q6_k),
}
