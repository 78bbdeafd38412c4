"""Softmax attention in which each query chooses blocks of keys, without a matrix of all pairs."""

import ctypes
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import choose_backend
from ..custom_ops import contiguous_like, operation
from ..native import call
from ..native.build.openmp import threads
from ..operands import TRANSFORMED, materialize_neg, transformed
from ..softmax.dense import repeat
from ..tensors import per_root
from . import picked
from .definition import weighted
from .picked import Chosen

OP, SERVED = "attention to chosen blocks", ("reference", "torch", "native")
TILE = 64  # queries of a block that are gathered together
LOGITS = {"cpu": 2**20, "cuda": 2**26}  # logits in memory at a time


def attend(q: Tensor, k: Tensor, v: Tensor, at: Tensor, blocks: Tensor, size: int) -> Tensor:
    r"""Attend from each query to the keys of its blocks, up to its own position, in O(N S size D).

    Keys are cut into blocks of ``size`` tokens. The choice has no gradient. The queries of a block are gathered, so
    that each product has many of them, and recomputed in the backward pass. Memory is that of the operands, and on a
    CPU of one head's sums per thread.

    Args:
        q: (B,H,N,D) queries.
        k: (B,G,M,D) keys at positions 0 ... M - 1; G divides H.
        v: (B,G,M,E) values.
        at: (B,N) int64, the positions of the queries.
        blocks: (B,H,N,S), (B,G,N,S) or (B,1,N,S) int64, S different blocks for each query, or one choice for all heads
            that share a head of keys, or for all heads. A negative number stands for no block.
        size: Keys of a block. Blocks of one token that all heads share are read one by one.

    Returns:
        The output (B,H,N,E), 0 for a query that sees no key.

    References:
        Lu et al. 2025 (2502.13189), section 2.2; Yuan et al. 2025 (2502.11089), section 3.3.2, for shared choices.
    """
    q, k, v = materialize_neg(q, k, v)
    if not q.numel() or not v.numel():
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    why_not = call.why_not(q, k, v, None, family="pattern")
    why_not = why_not or ("" if call.available(_unit(blocks, size)) else "they could not be compiled")
    backend = choose_backend(OP, SERVED, {"native": why_not}, "reference" if transformed() else "")
    if backend == "torch" and transformed():
        raise ValueError(f"backend 'torch' cannot serve this call of {OP}: {TRANSFORMED}")
    if backend == "torch" and q.shape[2] == 1:
        return _one_query(q, k, v, at, blocks, size)
    r = Chosen(q, k, v, at.contiguous(), blocks.contiguous(), size, per_root(q.shape[-1]), backend == "native")
    return _plain(r)[0] if backend == "reference" else _attend(r)[0]


def allowed(at: Tensor, blocks: Tensor, size: int, keys: int) -> Tensor:
    """Return which of ``keys`` keys the queries see, bool (B,H|G,N,M): the dense form of ``at`` and ``blocks``."""
    count = -(-keys // size)
    chosen = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=blocks.device)
    # Numbers of no block go to a column that is cut off.
    at_most = blocks.masked_fill((blocks < 0) | (blocks >= count), count)
    chosen = chosen.scatter(-1, at_most, True)[..., :count].repeat_interleave(size, -1)[..., :keys]
    return chosen & (torch.arange(keys, device=at.device) <= at[:, None, :, None])


def _one_query(q: Tensor, k: Tensor, v: Tensor, at: Tensor, blocks: Tensor, size: int) -> Tensor:
    """A decode step, whose shapes do not depend on values: copies of the chosen keys."""
    heads, m = q.shape[1], k.shape[2]
    place = (blocks[..., None] * size + torch.arange(size, device=q.device)).flatten(3)  # (B,H|G,1,S size)
    seen = repeat((blocks >= 0).repeat_interleave(size, -1) & (place <= at[:, None, :, None]) & (place < m), heads)
    place = repeat(place.clamp(0, m - 1), heads)[:, :, 0, :, None]
    k, v = (repeat(x, heads).gather(2, place.expand(-1, -1, -1, x.shape[-1])) for x in (k, v))
    logits = (q @ k.mT).to(_wide(q)) * per_root(q.shape[-1])
    return weighted(logits, v, seen)[0]


def _unit(blocks: Tensor, size: int) -> str:
    return "pattern/picked" if size == blocks.shape[1] == 1 else "pattern/chosen"


def _plain(r: Chosen) -> tuple[Tensor, Tensor]:
    """The definition, over all pairs: output, and the log-sum-exp of each row without a gradient."""
    heads = r.q.shape[1]
    seen = repeat(allowed(r.at, r.blocks, r.size, r.k.shape[2]), heads)
    logits = (r.q @ repeat(r.k, heads).mT).to(_wide(r.q)) * r.scale
    out, _, lse = weighted(logits, repeat(r.v, heads), seen)
    return out, lse.detach()


def _forward(r: Chosen) -> tuple[Tensor, Tensor]:
    out, lse = _shapes(r)
    if r.native:
        _run("forward", r, lse, r.q, r.k, r.v, out)
        return out, lse
    if r.size == r.blocks.shape[1] == 1:
        picked.forward(r, out, lse)
        return out, lse
    tiles, wide = _Tiles(r), _wide(r.q)
    q, keys, values = tiles.queries(r.q), tiles.keys(r.k), tiles.keys(r.v)
    # The largest logit of each query first: its visits are spread over all tiles.
    top = torch.full((len(q) + 1,), -torch.inf, dtype=wide, device=q.device)
    for piece in tiles.pieces():
        logits = tiles.logits(piece, q, keys)
        top.scatter_reduce_(0, tiles.rows[piece].flatten(), logits.amax(-1).flatten(), "amax")
    total, out = torch.zeros_like(top), q.new_zeros(len(top), values.shape[-1], dtype=wide)
    for piece in tiles.pieces():
        rows = tiles.rows[piece].flatten()
        highest = top[rows].masked_fill(top[rows] == -torch.inf, 0.0).view(*tiles.rows[piece].shape, 1)
        p = (tiles.logits(piece, q, keys) - highest).exp_()
        total.index_add_(0, rows, p.sum(-1).flatten())
        out.index_add_(0, rows, (p.to(values.dtype) @ values[tiles.block[piece]]).to(wide).flatten(0, 1))
    out = out / total.masked_fill(total == 0, 1.0)[:, None]
    lse = torch.where(total > 0, top + total.log(), -torch.inf)
    return out[:-1].view(*r.q.shape[:3], -1).to(r.v.dtype), lse[:-1].view(r.q.shape[:3])


def _backward(r: Chosen, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: p = exp(logit - lse), dS = p (grad . v - grad . out)."""
    if r.native:
        dq, dk, dv = (contiguous_like(x) for x in (r.q, r.k, r.v))
        _run("backward", r, lse.contiguous(), r.q, r.k, r.v, out, grad, dq, dk, dv)
        return dq, dk, dv
    if r.size == r.blocks.shape[1] == 1:
        return picked.backward(r, grad, out, lse)
    tiles, wide = _Tiles(r), _wide(r.q)
    q, up, keys, values = tiles.queries(r.q), tiles.queries(grad), tiles.keys(r.k), tiles.keys(r.v)
    delta = F.pad((up.to(wide) * tiles.queries(out).to(wide)).sum(-1), (0, 1))
    logs = F.pad(lse.flatten(), (0, 1)).masked_fill(F.pad(lse.flatten(), (0, 1)) == -torch.inf, torch.inf)
    dq = q.new_zeros(len(q) + 1, q.shape[-1], dtype=wide)
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (keys, values))
    for piece in tiles.pieces():
        rows, block = tiles.rows[piece], tiles.block[piece]
        safe = rows.clamp(max=len(q) - 1)
        p = (tiles.logits(piece, q, keys) - logs[rows][..., None]).exp_()
        ds = ((up[safe] @ values[block].mT).to(wide) - delta[rows][..., None]).mul_(p).mul_(r.scale).to(q.dtype)
        dv.index_add_(0, block, (p.to(q.dtype).mT @ up[safe]).to(wide))
        dk.index_add_(0, block, (ds.mT @ q[safe]).to(wide))
        dq.index_add_(0, rows.flatten(), (ds @ keys[block]).to(wide).flatten(0, 1))
    dk, dv = (tiles.unblocked(x, like) for x, like in ((dk, r.k), (dv, r.v)))
    return dq[:-1].view_as(r.q).to(r.q.dtype), dk, dv


class _Tiles:
    """Tiles of queries that visit the same block of one head of keys, sorted by block.

    ``rows`` (T,TILE): the row of each visiting query, counted through batch, heads and tokens; their number for none.
    ``block`` (T,): the block, counted through batch, heads of keys and blocks.
    """

    def __init__(self, r: Chosen):
        (batch, heads, n, _), (groups, m), device = r.q.shape, r.k.shape[1:3], r.q.device
        self.r, self.count, self.total = r, -(-m // r.size), batch * heads * n
        at = r.at[:, None, :, None]
        unit = torch.arange(batch * groups, device=device).view(batch, groups).repeat_interleave(heads // groups, 1)
        blocks = repeat(r.blocks, heads)
        there = (blocks >= 0) & (blocks < self.count) & (blocks * r.size <= at)
        # No visit is dropped, so that shapes do not depend on values: those of no block come last and see nothing.
        none = batch * groups * self.count
        keys = torch.where(there, unit[:, :, None, None] * self.count + blocks, none).flatten()
        rows = torch.arange(self.total, device=device).view(batch, heads, n, 1).expand_as(blocks).flatten()
        keys, order = keys.sort(stable=True)
        rows = torch.where(keys < none, rows[order], self.total)
        visits = torch.zeros(none + 1, dtype=torch.int64, device=device).scatter_add(0, keys, torch.ones_like(keys))
        tiles = -(-visits // TILE)
        first = tiles.cumsum(0) - tiles
        place = torch.arange(len(keys), device=device) - (visits.cumsum(0) - visits)[keys]
        most = len(keys) // TILE + none + 1
        self.rows = torch.full((most, TILE), self.total, device=device)
        self.rows[first[keys] + place // TILE, place % TILE] = rows
        self.block = torch.searchsorted(tiles.cumsum(0), torch.arange(most, device=device), right=True)
        self.block = self.block.clamp(max=none - 1)
        # Positions of the queries in blocks; padding sees nothing.
        self.at = F.pad(r.at.clamp(max=m - 1)[:, None].expand(batch, heads, n).flatten(), (0, 1), value=-1)

    def pieces(self) -> Iterator[slice]:
        step = max(1, LOGITS.get(self.rows.device.type, LOGITS["cpu"]) // (TILE * self.r.size))
        return (slice(start, start + step) for start in range(0, len(self.rows), step))

    def queries(self, x: Tensor) -> Tensor:
        return x.reshape(self.total, x.shape[-1])

    def keys(self, x: Tensor) -> Tensor:
        """(B,G,M,D) -> (B G blocks,size,D), zeros after the last key."""
        x = F.pad(x, (0, 0, 0, self.count * self.r.size - x.shape[2]))
        return x.reshape(-1, self.r.size, x.shape[-1])

    def unblocked(self, x: Tensor, like: Tensor) -> Tensor:
        return x.view(*like.shape[:2], -1, like.shape[-1])[:, :, : like.shape[2]].to(like.dtype).contiguous()

    def logits(self, piece: slice, q: Tensor, keys: Tensor) -> Tensor:
        """Return the logits (T,TILE,size), -inf for keys after the query."""
        rows, block = self.rows[piece], self.block[piece]
        j = (block % self.count * self.r.size)[:, None, None] + torch.arange(self.r.size, device=q.device)
        x = (q[rows.clamp(max=len(q) - 1)] @ keys[block].mT).to(_wide(q)) * self.r.scale
        return x.masked_fill_(j > self.at[rows][..., None], -torch.inf)


def _run(name: str, r: Chosen, lse: Tensor, *tensors: Tensor) -> None:
    (batch, heads, n, dim), (groups, m) = r.q.shape, r.k.shape[1:3]
    sizes = (batch, heads, groups, n, m, dim, r.v.shape[-1], r.size, r.blocks.shape[-1], r.blocks.shape[1])
    unit = _unit(r.blocks, r.size)
    failed = getattr(call.kernels(unit), f"longspan_{unit.removeprefix('pattern/')}_{name}")(
        (ctypes.c_void_p * len(tensors))(*call.pointers(*tensors)),
        call.strides(*tensors),
        *call.pointers(lse, r.at, r.blocks),
        (ctypes.c_long * len(sizes))(*sizes),
        call.TYPES[r.v.dtype],
        r.scale,
        threads(),
    )
    call.check_allocated(failed, "sums")


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _shapes(r: Chosen) -> tuple[Tensor, Tensor]:
    return r.v.new_empty(*r.q.shape[:3], r.v.shape[-1]), r.q.new_empty(r.q.shape[:3], dtype=_wide(r.q))


_attend = operation("chosen", Chosen, _forward, shapes=_shapes, again=_plain, inputs=3, backward=_backward)
