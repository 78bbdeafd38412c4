"""Patterns of images: rows, columns, and rectangles around blocks of pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import Pattern
from .atoms import block as same_block
from .atoms import strided
from .numbers import whole

_PIXELS = 1 << 20  # the largest block


def rows(width: int) -> Pattern:
    """Each pixel of a raster image sees its own row; the same as ``block(width)``."""
    whole("width", width, 1)
    return same_block(width)


def columns(width: int) -> Pattern:
    """Each pixel of a raster image sees its own column; the same as ``strided(width)``."""
    whole("width", width, 1)
    return strided(width)


def block_order(height: int, width: int, block: tuple[int, int]) -> Tensor:
    """Return the order in which images are generated block by block.

    Blocks of (h, w) pixels follow each other in raster order, and so do the pixels of each block. For x (B, height *
    width) in raster order, ``x[:, order]`` is in generation order, and ``y[:, order.argsort()]`` is the inverse.

    Args:
        height: Rows of the image.
        width: Columns of the image.
        block: (h, w), rows and columns of a block.

    Returns:
        (height * width,) int64, the raster number of each pixel in generation order.

    Raises:
        ValueError: If height or width is not a multiple of the block's.
    """
    whole("height", height, 1)
    whole("width", width, 1)
    h, w = _pair("block", block, 1)
    if height % h or width % w:
        raise ValueError(f"an image of {height} x {width} is not a multiple of blocks of {h} x {w}")
    pixels = torch.arange(height * width).view(height // h, h, width // w, w)
    return pixels.transpose(1, 2).flatten()


@dataclass(frozen=True)
class local2d(Pattern):
    """Each query sees its block of pixels, a margin to the left of it and a margin above it.

    Positions are in ``block_order`` of an image ``width`` pixels wide, with blocks of ``block`` = (h, w). With
    ``memory`` = (mh, mw), a query sees its own block, mw columns to the left of it, and mh rows above it, from mw
    columns left to mw columns right. Pixels outside the block are generated before it; combine with ``causal()`` for
    the order inside. The height of the image must be a multiple of h.

    Raises:
        ValueError: If the width is not a multiple of w.

    References:
        Parmar et al. 2018 (1802.05751), section 3.2.1, "2D local attention".
    """

    block: tuple[int, int]
    memory: tuple[int, int]
    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", _pair("block", self.block, 1))
        object.__setattr__(self, "memory", _pair("memory", self.memory, 0))
        whole("width", self.width, 1)
        if self.unit > _PIXELS:
            raise ValueError(f"block={self.block} has {self.unit} pixels; at most {_PIXELS}")
        if self.width % self.block[1]:
            raise ValueError(f"width={self.width} is not a multiple of the block's width {self.block[1]}")

    @property
    def unit(self) -> int:
        """Number of pixels in a block; its queries all see the same keys."""
        return self.block[0] * self.block[1]

    @property
    def reach(self) -> tuple[int | None, int | None]:
        # The largest distance is from the last pixel of a block to the first key of its memory, far enough down. It
        # grows until the memory's left edge is inside the image, and is constant from there on.
        (h, w), (up, side) = self.block, self.memory
        across, down = self.width // w, -(-up // h)
        y = down * h - up
        looks = []
        for column in (min(side // w, across - 1), min(-(-side // w), across - 1)):
            x = max(column * w - side, 0)
            first = (y // h * across + x // w) * self.unit + y % h * w + x % w
            looks.append((across * down + column + 1) * self.unit - 1 - first)
        return max(looks), self.unit - 1

    def _pixels(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of positions in generation order."""
        h, w = self.block
        unit, inside = positions // self.unit, positions % self.unit
        across = self.width // w
        return unit // across * h + inside // w, unit % across * w + inside % w

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        (h, w), (up, side) = self.block, self.memory
        top, left = self._pixels(i // self.unit * self.unit)
        y, x = self._pixels(j)
        above = (y >= top - up) & (y < top) & (x < left + w + side)
        level = (y >= top) & (y < top + h) & (x < left + w)
        return (above | level) & (x >= left - side)

    def spans(self, units: Tensor, head: int, layer: int) -> tuple[Tensor, Tensor]:
        """Each row of pixels in each block that the memory touches is one span."""
        (h, w), (up, side) = self.block, self.memory
        top, left = self._pixels(units * self.unit)
        # Limit the memory to the rows and columns of the image.
        up, across = min(up, int(top.max())), min(-(-side // w), self.width // w)
        y = top[:, None, None] + torch.arange(-up, h)[:, None]  # (U, rows, 1)
        column = left[:, None, None] // w + torch.arange(-across, across + 1)  # (U, 1, block columns)
        left, top = left[:, None, None], top[:, None, None]
        right = left + w + torch.where(y < top, side, 0)
        begin, end = (column * w).maximum(left - side), (column * w + w).minimum(right)
        exists = (y >= 0) & (column >= 0) & (column < self.width // w) & (begin < end)
        start = (y // h * (self.width // w) + column) * self.unit + y % h * w - column * w
        return torch.where(exists, start + begin, 0).flatten(1), torch.where(exists, start + end, 0).flatten(1)


def _pair(name: str, value: tuple[int, int], least: int) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
        raise ValueError(f"{name}={value!r} must be (height, width)")
    whole(f"{name}'s height", value[0], least)
    whole(f"{name}'s width", value[1], least)
    return value[0], value[1]
