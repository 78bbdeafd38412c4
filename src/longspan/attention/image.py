"""Softmax attention around blocks of pixels: an image is drawn block by block, each seeing what was drawn nearby."""

from torch import nn

from .. import patterns
from .._utils.spec import known
from ..ops.tensors import merge, split
from ..patterns import Pattern
from ..states import lookback
from .base import Attention


class Image(Attention):
    """All queries of a block of pixels share one memory, the block and what was drawn just before or around it.

    ``kind``: ``1d`` has pixels in raster order, ``2d`` in that of ``patterns.block_order``. ``block``: b, pixels whose
    queries see all of the block, a number, or in ``2d`` (h, w). ``memory``: so many pixels m before the block are seen;
    in ``2d`` it is (mh, mw), for mw columns to its left, and of the mh rows above it those from mw columns left to mw
    columns right. ``width``: of the image in ``2d``; ``1d`` knows none. No query sees a later pixel of its order, which
    for h > 1 is not raster order, so that x and what is predicted must be in it, too. Channels are tokens side by side.

    The state is a ring as large as the look back: block + memory tokens in ``1d``, about h + mh rows of the image in
    ``2d``.

    Source: Parmar et al. 2018, section 3.2.1. Raises ValueError for an unknown kind, sizes that do not fit it, a width
    that is no multiple of the block's, and a width that nothing reads.
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
            raise ValueError(f"width={width} belongs to kind='2d', not '1d', which knows no rows")
        self.kind, self.block, self.memory, self.width = kind, block, memory, width
        shape = (block, memory)
        # Both patterns refuse what is not of their kind: one number, or a pair.
        near = patterns.local1d(*shape) if kind == "1d" else patterns.local2d(*shape, width)  # type: ignore[arg-type]
        self.key_pattern: Pattern = near & patterns.causal()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def start(self, batch, capacity):
        return lookback.empty(self.key_pattern, batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        o, state = lookback.attend(
            q, k, v, state, self.key_pattern, mask=mask, segments=segments, record=record, donate=donate
        )
        return self.out(merge(o)), state
