"""C++ backend: the kernels for patterns on sorted tiles, with one mask for each tile and block of keys."""

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
from .windows import Layout, Sorted, Visibility, pieces

VECTOR = 16  # floats of the longest vector; tiles must be multiples of it
CPU = "cpu"  # device of the kernels, independent of the default device


def why_not(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> str:
    """Return why the kernels cannot run these operands, or "" if they can. The first call compiles the kernels."""
    if layout.size % VECTOR:
        return f"a tile of {layout.size} tokens is not a multiple of {VECTOR}"
    return call.why_not(q, k, v, None, family="pattern")


def read(
    rows: Sequence[Tensor], found: Sorted, visibility: Visibility, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend within the windows of one round, with one byte of memory for each pair of a window.

    Args:
        rows: Rows of q and k (*,D) and of v (*,E).
        found: The slots of the round.
        visibility: The visible pairs of each tile.
        layout: The layout of the slots.
        scale: Factor of the logits.

    Returns:
        The output of each slot (G,slots,E) and its log-sum-exp (G,slots) float32; 0 and -inf for slots without a query
        and for queries that see no key.
    """
    each, size = len(found.tokens), layout.size
    blocks, width = layout.slots // size, layout.wide // size
    masks = torch.empty(each, layout.tiles, width, size, size, dtype=torch.uint8, device=CPU)
    if visibility.rule.causal and not visibility.rule.whole:
        _fill_masks(masks, found, visibility, layout)
    else:
        for piece in pieces(layout, each, "cpu"):
            masks[:, piece] = visibility.visible(piece)
    counts = torch.zeros(each, blocks, dtype=torch.int64, device=CPU)
    counts[:, layout.back : layout.back + layout.tiles] = width
    offsets = F.pad(counts.flatten().cumsum(0), (1, 0))
    # Tile t of a row of slots is its block back + t, and its window starts at block t.
    starts = torch.arange(each, device=CPU)[:, None] * blocks + torch.arange(layout.tiles, device=CPU)
    keys = (starts[..., None] + torch.arange(width, device=CPU)).flatten()
    listed = Listed(size, offsets, keys, torch.arange(len(keys), device=CPU), masks.view(-1, size, size))
    own = F.pad(found.queries.view(each, -1), (layout.back * size, layout.ahead * size)).flatten()
    q, k, v = (x.index_select(0, at)[None, None] for x, at in zip(rows, (own, found.keys, found.keys), strict=True))
    out, lse = torch.empty_like(v), torch.empty(v.shape[:3], dtype=torch.float32, device=CPU)
    kernels.forward(q, k, v, out, lse, listed, scale)
    return out.view(each, layout.slots, -1), lse.view(each, layout.slots)


def _fill_masks(masks: Tensor, found: Sorted, visibility: Visibility, layout: Layout) -> None:
    """Fill ``masks`` for all tiles in one pass, for causal rules that count chunks within buckets."""
    codes, query_codes, band = (
        found.codes.contiguous(),
        found.query_codes.contiguous(),
        visibility.band.view(torch.uint8),
    )
    sizes = (*codes.shape, layout.tiles, layout.size, layout.wide // layout.size, layout.back)
    call.kernels("pattern/seen").longspan_buckets_seen(
        *call.pointers(codes, query_codes, band, masks),
        (ctypes.c_long * 8)(*sizes, reached(visibility.rule, visibility.chunks)),
        threads(),
    )
