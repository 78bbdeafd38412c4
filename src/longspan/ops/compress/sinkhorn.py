"""Sparse Sinkhorn attention: blocks of keys in a softly sorted order, given by a doubly stochastic matrix.

b is the number of tokens in a block, U the number of query blocks, V the number of key blocks. All results are float32
or float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import select_backend
from ..operands import transformed, with_higher_derivatives
from ..tensors import upcast_half

EMPTY = -1e30  # log of a weight of 0; finite, so that differences are not NaN
OP = "attention over sorted blocks"


def gumbel(like: Tensor) -> Tensor:
    """Sample Gumbel noise in the shape of ``like`` from torch's default generator."""
    return -torch.empty_like(like).exponential_().log()


def balance(scores: Tensor, iterations: int, allowed: Tensor | None = None) -> Tensor:
    """Normalize rows and columns of exp(scores) in turn, in log space (Sinkhorn normalization).

    Each iteration normalizes rows, then columns. Rows are normalized once more at the end. So rows sum to 1 up to
    rounding, and columns as closely as the iterations bring them.

    Args:
        scores: (...,U,V) scores.
        iterations: Number of iterations.
        allowed: bool, broadcast to the scores; the result is 0 where it is False. None: all are allowed.

    Returns:
        The sorting matrix (...,U,V).

    References:
        Tay et al. 2020 (2002.11296), section 3.1.2; Adams and Zemel 2011 (1106.1925).
    """
    allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed
    logs = scores.masked_fill(~allowed, EMPTY)
    for _ in range(iterations):
        logs = (logs - logs.logsumexp(-1, keepdim=True)).masked_fill(~allowed, EMPTY)
        logs = (logs - logs.logsumexp(-2, keepdim=True)).masked_fill(~allowed, EMPTY)
    return logs.softmax(-1).masked_fill(~allowed, 0.0)


def balance_causal(scores: Tensor, before: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """``balance`` for causal rows: row u divides by column sums over rows up to u only.

    Sums over whole columns would let row u depend on later rows, and so on later tokens.

    Args:
        scores: (B,H,U,V) scores.
        before: (B,H,T,V) logs of the column sums over earlier rows, for each of T iterations; ``EMPTY`` for none.
        allowed: (B,1,U,V) bool; the result is 0 where it is False.

    Returns:
        The sorting matrix (B,H,U,V), and the logs of the column sums after 0, 1, ... U rows of this call,
        (B,H,T,1+U,V).
    """
    logs, sums = scores.masked_fill(~allowed, EMPTY), []
    for earlier in before.unbind(2):
        logs = (logs - logs.logsumexp(-1, keepdim=True)).masked_fill(~allowed, EMPTY)
        sums.append(_logcumsumexp(torch.cat([earlier[:, :, None], logs], 2)))
        logs = (logs - sums[-1][:, :, 1:]).masked_fill(~allowed, EMPTY)
    batch, heads, rows, columns = scores.shape
    after = torch.stack(sums, 2) if sums else scores.new_zeros(batch, heads, 0, 1 + rows, columns)
    return logs.softmax(-1).masked_fill(~allowed, 0.0), after


def _logcumsumexp(logs: Tensor) -> Tensor:
    """``logs.logcumsumexp(2)`` with a second derivative; torch's takes the logarithm of zeros."""
    if transformed() and not torch.compiler.is_compiling():
        return _logcumsumexp_pairs(logs)
    y = logs.logcumsumexp(2)
    follows = y.requires_grad and not torch.compiler.is_compiling()
    return with_higher_derivatives(y, _logcumsumexp_pairs, logs) if follows else y


def _logcumsumexp_pairs(logs: Tensor) -> Tensor:
    n = logs.shape[2]
    later = torch.ones(n, n, dtype=torch.bool, device=logs.device).triu(1)
    return logs[:, :, None].masked_fill(later[..., None], -torch.inf).logsumexp(3)


def mix(sort: Tensor, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sort blocks: token p of sorted block u is the mean of token p over all blocks, with weights S_u.

    Blocks without a token p are left out. ``mass`` is the sum of the remaining weights: 1 unless the last block is not
    full or the row is empty.

    Args:
        sort: (B,H,U,V) sorting matrix S.
        x: (B,H,V,b,D) blocks of tokens.
        valid: (B,1,V,b) bool, True on real tokens.

    Returns:
        The sorted blocks (B,H,U,b,D) and ``mass`` (B,H,U,b).
    """
    mass = sort @ valid.to(sort.dtype).expand(-1, sort.shape[1], -1, -1)
    mixed = sort @ (x * valid[..., None]).flatten(-2)
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
    """Attend from each query to its own block and to the sorted block of the same number, in O(N b D + U V b D).

    The log of ``mass`` from ``mix`` is added to the logits of a sorted block. So a block that is not full counts with
    the tokens that it has. For a permutation P, this is softmax attention over Block(u) and Block(P(u)).

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,M,D) keys at positions 0 ... M - 1.
        v: (B,H,M,E) values.
        sort: (B,H,U,V) sorting matrix: the weight of each of the ceil(M / block) key blocks in each sorted block. Its
            rows are the ``spanned`` blocks, from that of the first query on.
        block: Tokens per block.
        start: (B,) position of the first query; None: 0.
        total: (B,) number of real keys, which come first; None: all. The output of queries beyond them is undefined.
        causal: Within its own block, a query sees keys up to its own. For the sorted block, ``sort`` must be causal.
        cut: If positive, every query sees the first ``cut`` sorted blocks instead, and not its own block; not causal.

    Returns:
        The output (B,H,N,E).

    References:
        Tay et al. 2020 (2002.11296), sections 3.2-3.4, with both blocks in one softmax.
    """
    q, k, v, sort = (upcast_half(x) for x in (q, k, v, sort))
    # If all keys are in one block, no token needs the padding behind them.
    block = min(block, k.shape[2])
    if select_backend(OP) == "reference":
        return _reference(q, k, v, sort, block, start, total, causal, cut)
    scale, n = q.shape[-1] ** -0.5, q.shape[2]
    keys, values = blocks(k, block), blocks(v, block)  # (B,H,V,b,.)
    last = torch.full_like(keys[:, 0, 0, 0, 0], k.shape[2], dtype=torch.long) if total is None else total
    places = torch.arange(keys.shape[2] * block, device=q.device).unflatten(0, (-1, block))
    valid = (places < last[:, None, None])[:, None]  # (B,1,V,b)
    if cut:
        sort = sort[:, :, :cut]
    far_keys, mass = mix(sort, keys, valid)
    far_values, _ = mix(sort, values, valid)
    log_mass = torch.where(mass > 0, mass, 1.0).log().masked_fill(mass == 0, EMPTY)
    if cut:
        logits = q @ far_keys.flatten(2, 3).mT * scale + log_mass.flatten(2)[:, :, None]
        return logits.softmax(-1) @ far_values.flatten(2, 3)
    own, skipped = _query_blocks(start, last, block, sort.shape[2])
    rows = _align_to_blocks(q, skipped, sort.shape[2] * block).unflatten(2, (-1, block))  # (B,H,U,b,D)
    if start is not None:
        keys, values, valid = (_gather_blocks(x, own) for x in (keys, values, valid[..., None]))
        valid = valid[..., 0]
    seen = valid[:, :, :, None]  # (B,1,U,1,b)
    if causal:
        seen = torch.ones(block, block, dtype=torch.bool, device=q.device).tril()
    near = (rows @ keys.mT * scale).masked_fill(~seen, EMPTY)
    far = rows @ far_keys.mT * scale + log_mass[..., None, :]
    p = torch.cat([far, near], -1).softmax(-1)
    o = (p[..., :block] @ far_values + p[..., block:] @ values).flatten(2, 3)
    return o[:, :, :n] if start is None else _gather_blocks(o, skipped[:, None] + torch.arange(n, device=q.device))


def spanned(tokens: int, block: int, *, anywhere: bool) -> int:
    """Return the number of blocks that ``tokens`` tokens touch, at most if they may start ``anywhere`` in a block."""
    return -(-(tokens + (block - 1 if anywhere else 0)) // block)


def blocks(x: Tensor, block: int) -> Tensor:
    """Split (B,H,M,D) into blocks (B,H,V,b,D), with zeros at the end of the last one."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))


def _query_blocks(start: Tensor | None, like: Tensor, block: int, blocks: int) -> tuple[Tensor, Tensor]:
    """The blocks of the queries (B,U), and the number of tokens before the first query in its block (B,)."""
    start = torch.zeros_like(like) if start is None else start
    return (start // block)[:, None] + torch.arange(blocks, device=like.device), start % block


def _gather_blocks(x: Tensor, index: Tensor) -> Tensor:
    """Gather x (B,H,T,...) at index (B,U) -> (B,H,U,...); indices past the end are clamped."""
    index = index.clamp(max=x.shape[2] - 1)[(slice(None), None, slice(None), *[None] * (x.dim() - 3))]
    return x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))


def _align_to_blocks(x: Tensor, skipped: Tensor, places: int) -> Tensor:
    """Shift the rows of x (B,H,N,D) by ``skipped`` (B,) -> (B,H,places,D); other rows are undefined."""
    index = torch.arange(places, device=x.device) - skipped[:, None]
    return _gather_blocks(x, index.clamp(min=0))


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
    """The definition, for one row and one block of queries at a time."""
    out, (_, heads, n, size) = [], q.shape
    for b in range(len(q)):
        first, last = 0 if start is None else int(start[b]), k.shape[2] if total is None else int(total[b])
        at = torch.arange(first, first + n, device=q.device)
        keys, values = (blocks(x[b : b + 1, :, :last], block)[0] for x in (k, v))  # (H,V,b,.)
        valid = torch.arange(keys.shape[1] * block, device=q.device).unflatten(0, (-1, block)) < last  # (V,b)
        found = []
        for u in range(first // block, -(-min(first + n, last) // block)):
            i, parts = at[(at // block == u) & (at < last)], []
            for row in range(min(cut, sort.shape[2])) if cut else [u - first // block]:
                share = sort[b, :, row, : len(valid), None] * valid  # (H,V,b)
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
