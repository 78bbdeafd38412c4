"""Image transformer: softmax attention of blocks of pixels to the earlier pixels nearby."""

from typing import Any

from .. import patterns
from .._utils.spec import known
from ..states import lookback
from .patterned import Patterned


class Image(Patterned):
    """Each pixel sees the earlier pixels of its block and of a memory around the block.

    ``kind``: ``1d`` for pixels in raster order, or ``2d`` for pixels in the order of ``patterns.block_order``.
    ``block``: b, the number of pixels of a block; (h, w) in ``2d``. ``memory``: m, the number of visible pixels before
    the block; (mh, mw) in ``2d``. ``width``: the width of the image in ``2d``; 0 in ``1d``.

    In ``2d`` the memory is mw columns to the left of the block, and mh rows above it, from mw columns left to mw
    columns right. No query sees a later pixel of its order. In ``2d`` with h > 1 this is not raster order: inputs and
    targets must be in block order, too. The channels of a pixel are consecutive tokens.

    The state is a ring of the look-back: block + memory tokens in ``1d``, about h + mh rows of the image in ``2d``.

    Source: Parmar et al. 2018, section 3.2.1. Raises ValueError for an unknown kind, for sizes that do not match the
    kind, for a width that is not a multiple of the block width, and for a width in ``1d``.
    """

    name, paper, cost = "image", "1802.05751", "N W D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j, \quad p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"\text{1d:} \quad P_i = \lbrace j \le i : j \ge b \lfloor i / b \rfloor - m \rbrace",
    )
    citation = (
        "Parmar, Niki and Vaswani, Ashish and Uszkoreit, Jakob and Kaiser, Lukasz and Shazeer, Noam and "
        "Ku, Alexander and Tran, Dustin",
        "Image Transformer",
        2018,
    )
    examples = ("image(block=5, memory=3)", "image(kind='2d', block=(2, 3), memory=(1, 2), width=6)")
    states = (lookback.Window,)
    directions = ("causal",)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        kind: str = "1d",
        block: int | tuple[int, int] = 128,
        memory: int | tuple[int, int] = 128,
        width: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        known(kind, dict.fromkeys(("1d", "2d")), "kind of image attention")
        if kind == "1d" and width:
            raise ValueError(f"width={width} needs kind='2d'; kind='1d' has no rows")
        self.kind, self.block, self.memory, self.width = kind, block, memory, width
        # Both patterns reject sizes of the other kind: a number, or a pair.
        shape: tuple[Any, Any] = (block, memory)
        near = patterns.local1d(*shape) if kind == "1d" else patterns.local2d(*shape, width)
        self.see(near & patterns.causal())
