"""The choice of the tokens with the largest scores, and the form of ``chosen`` that gathers single tokens."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import choose_backend
from ..compress import select
from ..custom_ops import contiguous_like, register
from ..native import call
from ..native.build.openmp import threads
from ..operands import transformed
from ..tensors import per_root, upcast_half

OP, SERVED = "choice of the largest scores", ("reference", "torch", "native")
UNIT = "pattern/picked"
GATHERED = 2**24  # elements of copied keys in memory at a time
SCORES = 2**22  # scores in memory at a time


class Chosen(NamedTuple):
    """Operands of attention to chosen blocks."""

    q: Tensor  # (B,H,N,D)
    k: Tensor  # (B,G,M,D)
    v: Tensor  # (B,G,M,E)
    at: Tensor  # (B,N) int64
    blocks: Tensor  # (B,H|G|1,N,S) int64
    size: int
    scale: float
    native: bool  # use the C++ kernels


def choose(q: Tensor, k: Tensor, weights: Tensor, at: Tensor, picks: int) -> Tensor:
    r"""Return the tokens with the largest scores $\sum_h w_{ih} \max(0, q_{ih} \cdot k_s)$ for each query.

    All pairs are scored, some queries at a time. Among equal scores the first tokens win.

    Args:
        q: (B,N,I,D) queries of I small heads.
        k: (B,M,D) keys, which the heads share.
        weights: (B,N,I), the weights of the heads.
        at: (B,N) int64, the positions of the queries, which see no later token.
        picks: The number of tokens to choose.

    Returns:
        (B,N,S) int64, ascending, S at most ``picks``, and -1 where there are fewer tokens.

    References:
        DeepSeek-AI 2025 (2512.02556), eq. 1.
    """
    q, k, weights = (t.detach() for t in (q, k, weights))
    (batch, n, heads), m = q.shape[:3], k.shape[1]
    picks = min(picks, m)
    given, at = [upcast_half(t).contiguous() for t in (q, k, weights)], at.contiguous()
    why_not = call.unreadable(*given) or ("" if given[0].dtype == torch.float32 else "they take float32")
    why_not = why_not or ("" if call.available(UNIT) else "they could not be compiled")
    backend = choose_backend(OP, SERVED, {"native": why_not}, "reference" if transformed() else "")
    if backend == "native":
        return _choose(*given, at, picks)
    found, size = [], n if backend == "reference" else max(1, SCORES // max(batch * heads * m, 1))
    for start in range(0, n, size) or [0]:
        part = slice(start, start + size)
        logits = torch.einsum("bnhd,bmd->bnhm", given[0][:, part], given[1]).relu()
        total = torch.einsum("bnhm,bnh->bnm", logits, given[2][:, part])[:, None]
        taken = select.largest(total, torch.arange(m, device=q.device) <= at[:, None, part, None], picks)[:, 0]
        # Each taken token in the column of its rank.
        column = torch.where(taken, taken.cumsum(-1) - 1, picks)
        numbers = torch.arange(m, device=q.device).expand_as(column)
        rows = torch.full((*column.shape[:2], picks + 1), -1, dtype=torch.int64, device=q.device)
        found.append(rows.scatter(-1, column, numbers)[..., :picks])
    return torch.cat(found, 1)


def largest(x: Tensor, picks: int) -> Tensor:
    """Return where the largest numbers of each row are, without gradients: x (...,M) -> (...,S) int64, ascending.

    S is at most ``picks``. Among equal numbers the first win, -inf is not taken, and -1 follows where there are fewer.
    """
    x, picks = x.detach(), min(picks, x.shape[-1])
    if x.dtype == torch.float32 and x.numel() and not call.unreadable(x) and call.available(UNIT):
        return _largest(x.contiguous(), picks)
    found, best = x.sort(dim=-1, descending=True, stable=True)
    none = x.shape[-1]
    best = best[..., :picks].masked_fill(found[..., :picks] == -torch.inf, none).sort(-1).values
    return best.masked_fill(best == none, -1)


def weights(q: Tensor, k: Tensor, at: Tensor, index: Tensor) -> Tensor:
    """Return the weights of picked tokens, summed over the heads, without gradients, some queries at a time.

    Args:
        q: (B,H,N,D) queries.
        k: (B,G,M,D) keys.
        at: (B,N) int64, the positions of the queries.
        index: (B,N,S) int64, the tokens; a negative number stands for none.

    Returns:
        (B,N,S).
    """
    r, found = Chosen(q.detach(), k.detach(), k.detach(), at, index[:, None], 1, per_root(q.shape[-1]), False), []
    with torch.no_grad():
        for part in _pieces(r):
            logits, seen = _logits(r, part)[:2]
            p = logits.masked_fill(~seen.any(-1, keepdim=True), 0.0).softmax(-1).masked_fill(~seen, 0.0)
            found.append(p.sum((1, 2)))
    return torch.cat(found, 1)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return the picked tokens of x (B,G,M,D): (B,G,N,S,D), some token where there is none."""
    batch, groups, _, dim = x.shape
    place = index.clamp(min=0).flatten(1)[:, None, :, None].expand(-1, groups, -1, dim)
    return x.gather(2, place).view(batch, groups, *index.shape[1:], dim)


def _run_choose(q: Tensor, k: Tensor, weights: Tensor, at: Tensor, picks: int) -> Tensor:
    index = _chosen(q, k, weights, at, picks)
    (batch, n, heads, dim), m = q.shape, k.shape[1]
    sizes = (ctypes.c_long * 6)(batch, n, m, heads, dim, picks)
    run = call.kernels(UNIT).longspan_picked_choose
    call.check_allocated(run(*call.pointers(q, k, weights, at, index), sizes, threads()), "scores")
    return index


def _chosen(q: Tensor, k: Tensor, weights: Tensor, at: Tensor, picks: int) -> Tensor:
    return torch.empty(*at.shape, picks, dtype=torch.int64, device=q.device)


def _run_largest(x: Tensor, picks: int) -> Tensor:
    index, scores = _places(x, picks), x.shape[-1]
    run = call.kernels(UNIT).longspan_picked_largest
    failed = run(*call.pointers(x, index), x.numel() // scores, scores, picks, threads())
    call.check_allocated(failed, "scores")
    return index


def _places(x: Tensor, picks: int) -> Tensor:
    return torch.empty(*x.shape[:-1], picks, dtype=torch.int64, device=x.device)


# Operations, so that compiled graphs call them. They have no gradients.
_choose, _largest = register("choose", _run_choose, _chosen), register("largest", _run_largest, _places)


def _pieces(r: Chosen) -> list[slice]:
    batch, groups, _, dim = r.k.shape
    size = max(1, GATHERED // max(1, batch * r.blocks.shape[3] * max(groups * dim, r.q.shape[1])))
    return [slice(start, start + size) for start in range(0, r.q.shape[2], size)]


def _logits(r: Chosen, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (B,G,R,n,S) of some queries, -inf where there is no token, which tokens there are, their keys, numbers."""
    index = r.blocks[:, 0, part]
    seen = (index >= 0) & (index < r.k.shape[2]) & (index <= r.at[:, part, None])
    index = index.masked_fill(~seen, 0)
    keys, seen = gathered(r.k, index), seen[:, None, None]
    q = r.q[:, :, part].unflatten(1, (r.k.shape[1], -1))
    logits = torch.einsum("bgrnd,bgnsd->bgrns", q, keys).to(torch.promote_types(q.dtype, torch.float32)) * r.scale
    return logits.masked_fill(~seen, -torch.inf), seen, keys, index


def forward(r: Chosen, out: Tensor, lse: Tensor) -> None:
    """Write the output and the log-sum-exp of each row, for one choice of blocks of one token for all heads."""
    for part in _pieces(r):
        logits, seen, _, index = _logits(r, part)
        found = logits.logsumexp(-1)
        p = (logits - found.masked_fill(~seen.any(-1), 0.0)[..., None]).exp().to(r.v.dtype)
        o = torch.einsum("bgrns,bgnse->bgrne", p, gathered(r.v, index))
        out[:, :, part], lse[:, :, part] = o.flatten(1, 2), found.flatten(1, 2)


def backward(r: Chosen, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v: p = exp(logit - lse), dS = p (grad . v - grad . out)."""
    groups, wide = r.k.shape[1], lse.dtype
    dq = contiguous_like(r.q)
    dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (r.k, r.v))
    delta = (grad.to(wide) * out.to(wide)).sum(-1)
    for part in _pieces(r):
        logits, seen, keys, index = _logits(r, part)
        q, up, sums, less = (x[:, :, part].unflatten(1, (groups, -1)) for x in (r.q, grad, lse, delta))
        p = (logits - sums.masked_fill(~seen.any(-1), 0.0)[..., None]).exp()
        ds = torch.einsum("bgrne,bgnse->bgrns", up, gathered(r.v, index)).to(wide)
        ds = ((ds - less[..., None]) * p * r.scale).to(q.dtype)
        dq[:, :, part] = torch.einsum("bgrns,bgnsd->bgrnd", ds, keys).flatten(1, 2)
        place = index.flatten(1)[:, None, :, None]
        for total, grads, rows in ((dk, ds, q), (dv, p.to(q.dtype), up)):
            each = torch.einsum("bgrns,bgrnd->bgnsd", grads, rows).flatten(2, 3).to(wide)
            total.scatter_add_(2, place.expand_as(each), each)
    return dq, dk.to(r.k.dtype), dv.to(r.v.dtype)
