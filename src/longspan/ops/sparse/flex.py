"""FlexAttention backend for GPUs: attention under a pattern, with the block lists of the pattern."""

import importlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import patterns
from ...patterns import Pattern
from ..operands import zero_masked
from ..rows import gather_valid, scatter_back
from .schedule import plan, tabled

SIZE = 128  # tokens per block of FlexAttention
CHANNELS = 16  # smallest head dimension of FlexAttention
COMPILED = 64  # kinds of calls (shapes, dtypes, gradients) to compile for; torch's own limit is 8


def why_not(q: Tensor, k: Tensor, v: Tensor, text: str, layer: int) -> str:
    """Return why FlexAttention should not run these operands, or "" if it should."""
    if not q.is_cuda:
        return f"it needs a GPU: on {q.device.type} it has no backward and no log-sum-exp"
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace the block lists"
    if torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportAttributeAccessIssue] (torch's stubs lack it)
        return "its kernels are invisible to the dispatch mode that follows the operations of torch"
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels support float32, bfloat16 and float16, not {v.dtype}"
    heads = range(q.shape[1] if patterns.parse(text).per_head else 1)
    if any(plan(text, k.shape[2], head, layer, True)[1] for head in heads):
        return "strided parts run as dense products over classes of tokens"
    return ""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    text: str,
    layer: int,
    scale: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``blockwise.attend`` with a gradient of the log-sum-exps, also for packed and padded rows.

    Nothing waits for the device.

    Args:
        q: (B,H,N,D) queries.
        k: (B,G,N,D) keys.
        v: (B,G,N,E) values.
        text: Spec of the pattern.
        layer: Number of the layer, for patterns that differ by layer.
        scale: Factor of the logits.
        mask: (B,N) bool, True on real tokens; positions count only these. None: all are.
        segments: (B,N) int64, packed sequences, each with positions from 0; equal ids are adjacent. None: one.

    Returns:
        Output (B,H,N,E) and log-sum-exp (B,H,N), 0 and -inf for a query that sees no key, as masked ones do.
    """
    n, width = q.shape[2], v.shape[-1]
    heads = q.shape[1] if patterns.parse(text).per_head else 1
    q, k, v = (F.pad(x, (0, max(0, CHANNELS - x.shape[-1]))) for x in (q, k, v))
    if mask is None and segments is None:
        o, lse = _call(q, k, v, block_mask(text, n, heads, layer, q.device), scale)
        return o[..., :width], lse
    # Real tokens first, so that a distance in the row is a distance in the sequence.
    q, k, v = gather_valid(mask, *zero_masked(mask, q, k, v), axis=2)
    starts = sequence_starts(mask, segments, q)
    o, lse = _call(q, k, v, packed_mask(blocks_of(text, n, heads, layer, q.device), starts), scale)
    if mask is None:
        return o[..., :width], lse
    o, lse = scatter_back(mask, o, 2), scatter_back(mask, lse, 2)
    absent = ~mask[:, None]
    return o[..., :width].masked_fill(absent[..., None], 0.0), lse.masked_fill(absent, -torch.inf)


class Pairs(NamedTuple):
    """The pairs of blocks that each head needs, and the pairs of tokens within them."""

    table: Tensor  # (H|1,nb,nb) int32: 0 for no pair, 1 for all pairs, else the number of a mask
    masks: Tensor  # (masks,SIZE,SIZE) bool; 0 hides all pairs, 1 hides none
    range: Tensor | None  # (2,H|1) int32, least and largest i - j, if the pattern is such a range in each head


@lru_cache(maxsize=64)
def blocks_of(text: str, n: int, heads: int, layer: int, device: torch.device) -> Pairs:
    """Return the blocks of a pattern over n tokens on a device; ``heads`` is 1 if all heads share it."""
    pattern, tables = patterns.parse(text), list[Tensor]()
    masks = [torch.zeros(1, SIZE, SIZE, dtype=torch.bool), torch.ones(1, SIZE, SIZE, dtype=torch.bool)]
    ranges, before = [_range(pattern.at(head, layer), n, head, layer) for head in range(heads)], 2
    for head in range(heads):
        blocks = tabled(pattern.at(head, layer), n, SIZE, head, layer)
        count = len(blocks.offsets) - 1
        row = torch.repeat_interleave(torch.arange(count), blocks.offsets.diff())
        tables.append(torch.zeros(count, count, dtype=torch.int32))
        tables[-1][row, blocks.keys] = torch.where(blocks.which < 0, 1, blocks.which + before).int()
        masks.append(blocks.masks.bool())
        before += len(blocks.masks)
    known = [one for one in ranges if one is not None]
    limits = torch.tensor(known, dtype=torch.int32).T.contiguous() if len(known) == heads else None
    table, mask = torch.stack(tables), torch.cat(masks[:2] if limits is not None else masks)
    # The first call may be in inference mode, and a later one in training.
    with torch.inference_mode(False):
        return Pairs(table.to(device), mask.to(device), None if limits is None else limits.to(device))


def _range(pattern: Pattern, n: int, head: int, layer: int) -> tuple[int, int] | None:
    """Least and largest i - j of a pattern that sees exactly the pairs between them; None for any other pattern."""
    if pattern.kind != "diagonal":
        return None
    # (n - 1, j) and (0, j) hold each distance of n tokens.
    ends, at = torch.tensor([[n - 1], [0]]), torch.arange(n)
    seen = pattern.allow(ends, at, head=head, layer=layer)
    apart = (ends - at)[seen]
    if not len(apart):
        return 1, 0
    low, high = int(apart.min()), int(apart.max())
    return (low, high) if len(apart.unique()) == high - low + 1 else None


@lru_cache(maxsize=64)
def block_mask(text: str, n: int, heads: int, layer: int, device: torch.device) -> Any:
    """Convert the block lists of a pattern to a ``BlockMask`` of O(H (N / 128)^2) integers; H is 1 for shared ones.

    Its predicate looks up tables, or compares i - j with two numbers of a table, instead of computing the pattern. So
    one compiled kernel serves all patterns.
    """
    pairs = blocks_of(text, n, heads, layer, device)
    table, masks, limits = pairs
    if limits is None:

        def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return masks[table[h % table.shape[0], i // SIZE, j // SIZE], i % SIZE, j % SIZE]

    else:

        def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            head = h % limits.shape[1]
            return (i - j >= limits[0, head]) & (i - j <= limits[1, head])

    with torch.inference_mode(False):
        return _from_lists((table > 1)[None], (table == 1)[None], n, allowed)


def packed_mask(pairs: Pairs, starts: Tensor) -> Any:
    """Return the ``BlockMask`` of rows that hold several sequences, each with the pattern from its own first token.

    Args:
        pairs: The pattern.
        starts: (B,N) int32, from ``sequence_starts``.
    """
    table, masks, limits = pairs
    if limits is None:

        def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            start = starts[b, i]
            # A pair of two sequences is hidden, but its numbers must be inside of the table.
            begin = start.clamp(min=0)
            at, key = i - begin, (j - begin).clamp(min=0)
            seen = masks[table[h % table.shape[0], at // SIZE, key // SIZE], at % SIZE, key % SIZE]
            return seen & (start == starts[b, j]) & (start >= 0)

    else:

        def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            start, head = starts[b, i], h % limits.shape[1]
            near = (i - j >= limits[0, head]) & (i - j <= limits[1, head])
            return near & (start == starts[b, j]) & (start >= 0)

    some, whole = _packed_blocks(table, starts)
    return _from_lists(some & ~whole, whole, starts.shape[1], allowed)


def sequence_starts(mask: Tensor | None, segments: Tensor | None, like: Tensor) -> Tensor:
    """Return where each token's sequence begins in rows whose real tokens come first.

    Args:
        mask: (B,N) bool, the real tokens before they were moved to the front, or None.
        segments: (B,N) int64, packed sequences before the move, or None.
        like: (B,H,N,...), for sizes and device.

    Returns:
        (B,N) int32, ascending, then -1 for masked tokens.
    """
    at = torch.arange(like.shape[2], device=like.device, dtype=torch.int32).expand(len(like), -1)
    starts = torch.zeros_like(at)
    if segments is not None:
        (ids,) = gather_valid(mask, segments)
        border = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
        starts = torch.where(border, at, 0).cummax(1).values
    return starts if mask is None else torch.where(at < mask.sum(1, keepdim=True), starts, -1)


def _packed_blocks(table: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of blocks that packed rows need, a superset, and those in which all pairs are allowed: (B,H|1,nb,nb)."""
    count = table.shape[-1]
    own = F.pad(starts, (0, count * SIZE - starts.shape[1]), value=-1).unflatten(1, (count, SIZE))
    first, last, single = own[..., 0], own.amax(-1), own.amin(-1) == own.amax(-1)
    row = torch.arange(count, device=table.device)
    earlier = row[None] <= row[:, None]  # keys before the queries
    # Two blocks have at most one sequence in common: that of the first query or, if the keys come later, of the last.
    query = torch.where(earlier, first[:, :, None], last[:, :, None])
    key = torch.where(earlier, last[:, None], first[:, None])
    shared = (query == key) & (query >= 0)
    found = [_touched(row[:, None], query, count), _touched(row[None], query, count)]
    some, whole = torch.zeros((), dtype=torch.bool, device=table.device), ~torch.zeros_like(shared)[None]
    # A sequence that begins within a block has its own blocks across the borders of the row's blocks.
    for i in found[0]:
        for j in found[1]:
            kind = table[:, i, j]  # (H|1,B,nb,nb)
            some, whole = some | (kind > 0), whole & (kind == 1)
    alone = single & (first >= 0)
    whole = whole & (shared & alone[:, :, None] & alone[:, None])
    # A block has several sequences in common with itself.
    diagonal = torch.eye(count, dtype=torch.bool, device=table.device) & (first >= 0)[:, :, None]
    return ((some & shared) | diagonal).transpose(0, 1), whole.transpose(0, 1)


def _touched(block: Tensor, start: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first and last block, counted from ``start``, with tokens of a block of the row: (B,nb,nb) each."""
    begin = block * SIZE - start
    return begin.clamp(min=0) // SIZE, ((begin + SIZE - 1) // SIZE).clamp(0, count - 1)


def _from_lists(partial: Tensor, full: Tensor, n: int, allowed: Callable[..., Tensor]) -> Any:
    """A ``BlockMask`` of partial and full blocks, (B|1,H|1,nb,nb) bool each."""
    lists = (*_ordered(partial), *_ordered(full))
    return _module().BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=SIZE, mask_mod=allowed, seq_lengths=(n, n))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(...,nb,nb) bool -> count of True in each row (...,nb), and column indices, those of True first (...,nb,nb).

    Contiguous, as the kernels read them whatever their strides are.
    """
    blocks = blocks.contiguous()
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int(), order.int()


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
    """Call the compiled kernels; without a place for another one, raise instead of the slow form of O(N^2) memory."""
    from torch._dynamo import config, exc

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    grouped = q.shape[1] != k.shape[1]
    with config.patch({limit: max(COMPILED, getattr(config, limit)), "fail_on_recompile_limit_hit": True}):
        try:
            return _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
        except exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"FlexAttention has been compiled for {getattr(config, limit)} kinds of calls in this process, and "
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} in {q.dtype} is another one; pad "
                f"sequences to fewer lengths, call torch._dynamo.reset() to forget the earlier kinds, or use "
                f'longspan.backend("torch")'
            ) from error


def _module() -> Any:
    # Imported on first use, because the import is slow.
    return importlib.import_module("torch.nn.attention.flex_attention")


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_flex())


def _flex() -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention with log-sum-exps, by the argument of the installed version of torch."""
    flex = _module()
    if not hasattr(flex, "AuxRequest"):
        return partial(flex.flex_attention, return_lse=True)

    def attention(*operands: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        o, aux = flex.flex_attention(*operands, **options, return_aux=flex.AuxRequest(lse=True))
        return o, aux.lse

    return attention
