"""Patterns of images: rows, columns, and rectangles around blocks, over pixels that are numbered one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import Pattern
from .atoms import block as same_block
from .atoms import strided
from .numbers import whole

_PIXELS = 1 << 20  # of a block; a row of any picture that is generated has fewer


def rows(width: int) -> Pattern:
    """Pixels of a raster image of that width see their own row: the pattern ``block(width)``, by another name."""
    whole("width", width, 1)
    return same_block(width)


def columns(width: int) -> Pattern:
    """Pixels of a raster image of that width see their own column: the pattern ``strided(width)``, by another name."""
    whole("width", width, 1)
    return strided(width)


def block_order(height: int, width: int, block: tuple[int, int]) -> Tensor:
    """Block-raster order: (height * width,) int64, the raster number of each pixel in the order of its generation.

    Blocks of (h, w) pixels follow each other in raster order, and so do the pixels of each. For x (B, height * width)
    in raster order, ``x[:, order]`` is in generation order and ``y[:, order.argsort()]`` goes back.

    Raises ValueError where height or width is no multiple of the block's.
    """
    whole("height", height, 1)
    whole("width", width, 1)
    h, w = _pair("block", block, 1)
    if height % h or width % w:
        raise ValueError(f"an image of {height} x {width} cannot be cut into whole blocks of {h} x {w}")
    pixels = torch.arange(height * width).view(height // h, h, width // w, w)
    return pixels.transpose(1, 2).flatten()


@dataclass(frozen=True)
class local2d(Pattern):
    """The queries of each block of pixels share a rectangle: the block, pixels to its left, and rows above it.

    Positions are in ``block_order``: of an image ``width`` pixels wide, cut into blocks of ``block`` = (h, w). With
    ``memory`` = (mh, mw) the queries of a block see the block itself, mw columns to its left, and of the mh rows above
    those from mw columns left to mw columns right of it. All that lies outside the block was generated before it; join
    ``causal()`` for the order inside.

    Parmar et al. 2018 (1802.05751), section 3.2.1, "2D local attention". Raises ValueError where the width is no
    multiple of the block's; so must be the height, which a pattern does not know.
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
        """Positions in a block of pixels, whose queries all see the same keys."""
        return self.block[0] * self.block[1]

    @property
    def reach(self) -> tuple[int | None, int | None]:
        # The longest look is from the last pixel of a block to the first key of its memory, at the left of its top row,
        # far enough down. It grows until the memory's left edge is inside the image, and is the same from there on.
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
        beside = (y >= top) & (y < top + h) & (x < left + w)
        return (above | beside) & (x >= left - side)

    def spans(self, units: Tensor, head: int, layer: int) -> tuple[Tensor, Tensor]:
        """Each row of pixels in each block that the memory touches is one span."""
        (h, w), (up, side) = self.block, self.memory
        top, left = self._pixels(units * self.unit)
        # No more rows and columns than there are, whatever the memory says.
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
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be (height, width)")
    whole(f"{name}'s height", value[0], least)
    whole(f"{name}'s width", value[1], least)
    return value[0], value[1]
