"""Blocks of keys in a softly sorted order: scores become a matrix of shares, and blocks are mixed by it.

``b`` tokens a block, ``U`` blocks of queries, ``V`` blocks of keys. Float32 at least throughout.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import select_backend
from ..operands import double_backward, transformed
from ..tensors import upcast_half

EMPTY = -1e30  # log of no weight; its differences are still numbers
OP = "attention over sorted blocks"


def gumbel(like: Tensor) -> Tensor:
    """-log(-log(uniform)) in the shape of ``like``, from torch's own generator."""
    return -torch.empty_like(like).exponential_().log()


def balance(scores: Tensor, iterations: int, allowed: Tensor | None = None) -> Tensor:
    """Shares S (..., U, V) of scores in log space: rows and columns of e^scores divided by their sums in turn.

    ``iterations`` times rows, then columns; then rows once more, so that every row sums to 1 to the bit's last place,
    and the columns as nearly as the iterations made them. Where ``allowed`` (bool, broadcast) is False the share is 0.

    Source: Tay et al. 2020 (2002.11296), section 3.1.2; Adams and Zemel 2011 (1106.1925).
    """
    allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed
    logs = scores.masked_fill(~allowed, EMPTY)
    for _ in range(iterations):
        logs = (logs - logs.logsumexp(-1, keepdim=True)).masked_fill(~allowed, EMPTY)
        logs = (logs - logs.logsumexp(-2, keepdim=True)).masked_fill(~allowed, EMPTY)
    return logs.softmax(-1).masked_fill(~allowed, 0.0)


def balance_causal(scores: Tensor, before: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The same for rows that come one after the other: a column's sum, for row u, is that over rows up to u.

    scores (B,H,U,V), allowed bool (B,1,U,V), before (B,H,T,V): for each of T iterations the log of each column's sum
    over earlier rows, EMPTY where there is none -> S (B,H,U,V), and those logs after no, one, ... and all rows of this
    call, (B,H,T,1+U,V). A plain sum over the column would tell row u of the rows, and the tokens, after it.
    """
    logs, sums = scores.masked_fill(~allowed, EMPTY), []
    for earlier in before.unbind(2):
        logs = (logs - logs.logsumexp(-1, keepdim=True)).masked_fill(~allowed, EMPTY)
        sums.append(_running(torch.cat([earlier[:, :, None], logs], 2)))
        logs = (logs - sums[-1][:, :, 1:]).masked_fill(~allowed, EMPTY)
    batch, heads, rows, columns = scores.shape
    after = torch.stack(sums, 2) if sums else scores.new_zeros(batch, heads, 0, 1 + rows, columns)
    return logs.softmax(-1).masked_fill(~allowed, 0.0), after


def _running(logs: Tensor) -> Tensor:
    """``logs.logcumsumexp(2)``, whose gradient has a gradient: torch's takes the logarithm of zeros there."""
    if torch.compiler.is_compiling():
        return logs.logcumsumexp(2)
    return _running_plain(logs) if transformed() else cast(Tensor, _Running.apply(logs))


def _running_plain(logs: Tensor) -> Tensor:
    n = logs.shape[2]
    later = torch.ones(n, n, dtype=torch.bool, device=logs.device).triu(1)
    return logs[:, :, None].masked_fill(later[..., None], -torch.inf).logsumexp(3)


class _Running(torch.autograd.Function):
    """The gradient is torch's; where it has to have gradients itself, it is that of all pairs of rows."""

    @staticmethod
    def forward(ctx: Any, logs: Tensor) -> Tensor:
        ctx.save_for_backward(logs)
        return logs.logcumsumexp(2)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (one gradient for the one output)
        ctx: Any, grad: Tensor
    ) -> Tensor | None:
        (logs,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return double_backward(_running_plain, (logs,), (grad,))[0]
        with torch.enable_grad():
            own = logs.detach().requires_grad_()
            return torch.autograd.grad(own.logcumsumexp(2), own, grad)[0]


def mix(sort: Tensor, x: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted blocks: sort (B,H,U,V), x (B,H,V,b,D), there bool (B,1,V,b) -> (B,H,U,b,D), mass (B,H,U,b).

    Place p of sorted block u is the mean of place p of all blocks with weights S_u, of those blocks that have such a
    place, and ``mass`` is the sum of these weights: 1 unless the last block is not full, or the row is empty.
    """
    mass = sort @ there.to(sort.dtype).expand(-1, sort.shape[1], -1, -1)
    mixed = sort @ (x * there[..., None]).flatten(-2)
    return mixed.unflatten(-1, x.shape[-2:]) / torch.where(mass > 0, mass, 1.0)[..., None], mass


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sort: Tensor,
    block: int,
    *,
    start: Tensor | None = None,
    total: Tensor | None = None,
    causal: bool = False,
    cut: int = 0,
) -> Tensor:
    """Softmax attention of each query over its own block and the sorted block of the same number, side by side.

    q (B,H,N,D), k (B,H,M,D), v (B,H,M,E), sort (B,H,U,V), the share that each of the ceil(M / block) blocks of keys has
    in each sorted block -> (B,H,N,E). Keys stand at positions 0, 1, ...; ``total`` (B,) says how many of them are real,
    None: all. Queries stand at positions start (B,), start + 1, ..., None: from 0 on; ``sort`` has rows for the
    ``spanned`` blocks, from that of the first query on. What a query reads that is beyond the keys means nothing.

    ``causal``: of its own block a query sees the keys up to its own; which blocks are sorted to it is for ``sort`` to
    say. ``cut``: instead, every query sees the first so many sorted blocks, and no own one; not causal.

    A place of a sorted block weighs as much as its ``mass``, which is added to the logit as its logarithm: so a block
    with fewer tokens counts with those that it has, and for a permutation this is plain attention over
    Block(u) and Block(P(u)). O(N b D + U V b D).

    Source: Tay et al. 2020 (2002.11296), sections 3.2-3.4, with keys side by side.
    """
    q, k, v, sort = (upcast_half(x) for x in (q, k, v, sort))
    # Where all keys are in one block, the places beyond them are nobody's.
    block = min(block, k.shape[2])
    if select_backend(OP) == "reference":
        return _reference(q, k, v, sort, block, start, total, causal, cut)
    scale, n = q.shape[-1] ** -0.5, q.shape[2]
    keys, values = blocks(k, block), blocks(v, block)  # (B,H,V,b,.)
    last = torch.full_like(keys[:, 0, 0, 0, 0], k.shape[2], dtype=torch.long) if total is None else total
    places = torch.arange(keys.shape[2] * block, device=q.device).unflatten(0, (-1, block))
    there = (places < last[:, None, None])[:, None]  # (B,1,V,b)
    if cut:
        sort = sort[:, :, :cut]
    far_keys, mass = mix(sort, keys, there)
    far_values, _ = mix(sort, values, there)
    weigh = torch.where(mass > 0, mass, 1.0).log().masked_fill(mass == 0, EMPTY)
    if cut:
        logits = q @ far_keys.flatten(2, 3).mT * scale + weigh.flatten(2)[:, :, None]
        return logits.softmax(-1) @ far_values.flatten(2, 3)
    own, skipped = _own(start, last, block, sort.shape[2])
    rows = _placed(q, skipped, sort.shape[2] * block).unflatten(2, (-1, block))  # (B,H,U,b,D)
    if start is not None:
        keys, values, there = (_taken(x, own) for x in (keys, values, there[..., None]))
        there = there[..., 0]
    seen = there[:, :, :, None]  # (B,1,U,1,b)
    if causal:
        seen = torch.ones(block, block, dtype=torch.bool, device=q.device).tril()
    near = (rows @ keys.mT * scale).masked_fill(~seen, EMPTY)
    far = rows @ far_keys.mT * scale + weigh[..., None, :]
    p = torch.cat([far, near], -1).softmax(-1)
    o = (p[..., :block] @ far_values + p[..., block:] @ values).flatten(2, 3)
    return o[:, :, :n] if start is None else _taken(o, skipped[:, None] + torch.arange(n, device=q.device))


def spanned(tokens: int, block: int, *, anywhere: bool) -> int:
    """How many blocks so many tokens touch: from a border on, or at most, from ``anywhere``."""
    return -(-(tokens + (block - 1 if anywhere else 0)) // block)


def blocks(x: Tensor, block: int) -> Tensor:
    """(B,H,M,D) -> (B,H,V,b,D), zeros at the end of the last one."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))


def _own(start: Tensor | None, like: Tensor, block: int, blocks: int) -> tuple[Tensor, Tensor]:
    """The blocks of the queries (B,U), and how many places of the first are before the first query (B,)."""
    start = torch.zeros_like(like) if start is None else start
    return (start // block)[:, None] + torch.arange(blocks, device=like.device), start % block


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """x (B,H,T,...), index (B,U) -> (B,H,U,...); what is beyond the end is the last."""
    index = index.clamp(max=x.shape[2] - 1)[(slice(None), None, slice(None), *[None] * (x.dim() - 3))]
    return x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))


def _placed(x: Tensor, skipped: Tensor, places: int) -> Tensor:
    """x (B,H,N,D) -> (B,H,places,D), with its rows moved on by ``skipped`` (B,); what is elsewhere means nothing."""
    index = torch.arange(places, device=x.device) - skipped[:, None]
    return _taken(x, index.clamp(min=0))


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sort: Tensor,
    block: int,
    start: Tensor | None,
    total: Tensor | None,
    causal: bool,
    cut: int,
) -> Tensor:
    """The definition, row by row and in each one block of queries after the other."""
    out, (_, heads, n, size) = [], q.shape
    for b in range(len(q)):
        first, last = 0 if start is None else int(start[b]), k.shape[2] if total is None else int(total[b])
        at = torch.arange(first, first + n, device=q.device)
        keys, values = (blocks(x[b : b + 1, :, :last], block)[0] for x in (k, v))  # (H,V,b,.)
        there = torch.arange(keys.shape[1] * block, device=q.device).unflatten(0, (-1, block)) < last  # (V,b)
        found = []
        for u in range(first // block, -(-min(first + n, last) // block)):
            i, parts = at[(at // block == u) & (at < last)], []
            for row in range(min(cut, sort.shape[2])) if cut else [u - first // block]:
                share = sort[b, :, row, : len(there), None] * there  # (H,V,b)
                mass = share.sum(1)  # (H,b)
                mean = (share / torch.where(mass > 0, mass, 1.0)[:, None])[..., None]
                bias = torch.where(mass > 0, mass, 1.0).log().masked_fill(mass == 0, EMPTY)[:, None]
                parts.append(((mean * keys).sum(1), (mean * values).sum(1), bias))
            if not cut:
                j = torch.arange(u * block, min((u + 1) * block, last), device=q.device)
                ahead = (j > i[:, None]) & causal
                parts.append((k[b][:, j], v[b][:, j], torch.zeros_like(ahead, dtype=q.dtype).masked_fill(ahead, EMPTY)))
            logits = [q[b][:, i - first] @ key.mT * size**-0.5 + bias for key, _, bias in parts]
            found.append(torch.cat(logits, -1).softmax(-1) @ torch.cat([value for _, value, _ in parts], 1))
        beyond = n - sum(part.shape[1] for part in found)
        out.append(torch.cat([*found, v.new_zeros(heads, beyond, v.shape[-1])], 1))
    return torch.stack(out)
