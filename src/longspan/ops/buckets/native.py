"""The softmax over sorted tiles by the C++ kernels for patterns: one mask for each tile and each block of keys."""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..native import call
from ..native.build.openmp import threads
from ..sparse import native as kernels
from ..sparse.schedule import Listed
from .places import reached
from .windows import Ask, Layout, Sorted, pieces

VECTOR = 16  # floats of the longest vector, of which the kernels take whole ones
CPU = "cpu"  # where the kernels work, whatever the process's default device is


def why_not(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> str:
    """Why the kernels cannot serve these operands; "" where they can. Compiles them on first use."""
    if layout.size % VECTOR:
        return f"a tile of {layout.size} tokens is no multiple of {VECTOR}"
    return call.why_not(q, k, v, None, family="pattern")


def read(rows: Sequence[Tensor], found: Sorted, ask: Ask, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """rows of q, k (*,D) and v (*,E) -> what each slot reads (G,slots,E), its log-sum (G,slots) float32.

    A slot that is no query's, or whose query sees nothing, reads 0 and has the log-sum -inf. Memory is that of one byte
    for each pair that is looked at.
    """
    each, size = len(found.tokens), layout.size
    blocks, width = layout.slots // size, layout.wide // size
    masks = torch.empty(each, layout.tiles, width, size, size, dtype=torch.uint8, device=CPU)
    if ask.rule.causal and not ask.rule.whole:
        _see(masks, found, ask, layout)
    else:
        for piece in pieces(layout, each, "cpu"):
            masks[:, piece] = ask.visible(piece)
    counts = torch.zeros(each, blocks, dtype=torch.int64, device=CPU)
    counts[:, layout.back : layout.back + layout.tiles] = width
    offsets = F.pad(counts.flatten().cumsum(0), (1, 0))
    # Tile t of a row of slots is its block back + t, and meets the blocks from t on.
    starts = torch.arange(each, device=CPU)[:, None] * blocks + torch.arange(layout.tiles, device=CPU)
    keys = (starts[..., None] + torch.arange(width, device=CPU)).flatten()
    listed = Listed(size, offsets, keys, torch.arange(len(keys), device=CPU), masks.view(-1, size, size))
    own = F.pad(found.queries.view(each, -1), (layout.back * size, layout.ahead * size)).flatten()
    q, k, v = (x.index_select(0, at)[None, None] for x, at in zip(rows, (own, found.keys, found.keys), strict=True))
    out, lse = torch.empty_like(v), torch.empty(v.shape[:3], dtype=torch.float32, device=CPU)
    kernels.forward(q, k, v, out, lse, listed, scale)
    return out.view(each, layout.slots, -1), lse.view(each, layout.slots)


def _see(masks: Tensor, found: Sorted, ask: Ask, layout: Layout) -> None:
    """``ask.seen`` of all tiles, for causal rules whose chunks are counted inside buckets, in one pass."""
    codes, asks, band = found.codes.contiguous(), found.asks.contiguous(), ask.band.view(torch.uint8)
    sizes = (*codes.shape, layout.tiles, layout.size, layout.wide // layout.size, layout.back)
    call.kernels("pattern").longspan_buckets_seen(
        *call.pointers(codes, asks, band, masks), (ctypes.c_long * 8)(*sizes, reached(ask.rule, ask.chunks)), threads()
    )
