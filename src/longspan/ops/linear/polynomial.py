"""Attention with a second-degree polynomial of q.k, exactly, in time that is linear in the length.

Its features, all products of two channels, are many: 2145 for D = 64. So they exist for one span of tokens at a time;
inside a span the similarity itself is cheaper, and the backward pass makes each span's features again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import gated
from ..backends import select_backend
from ..operands import materialize_neg, transformed, zero_masked
from ..segments import borders_of
from ..tensors import upcast_half, with_ones
from . import normalize

OP = "polynomial attention"
SHORTEST, LONGEST = 64, 512  # tokens of a span


def similarity(q: Tensor, k: Tensor, constant: float, taylor: bool) -> Tensor:
    """(q.k + constant)^2, or with ``taylor`` 1 + q.k + (q.k)^2 / 2: q (..., N, D), k (..., M, D) -> (..., N, M)."""
    products = q @ k.mT
    # As a sum of squares, so that rounding cannot make it negative.
    return ((products + 1).square() + 1) / 2 if taylor else (products + constant).square()


def features(x: Tensor, constant: float, taylor: bool) -> Tensor:
    """phi with phi(q).phi(k) = similarity(q, k), each pair of channels once: (..., D) -> (..., (D+1)(D+2)/2).

    Source: Katharopoulos et al. 2020 (2006.16236), section 3.2.1; with ``taylor`` Arora et al. 2024 (2402.18668).
    """
    one, linear, square = (1.0, 1.0, 0.5) if taylor else (constant**2, 2 * constant, 1.0)
    dim = x.shape[-1]
    # Channel i meets channel i + j on a ring, for j up to D / 2; for even D the second half of the last j repeats it.
    shifted = torch.cat([x, x[..., : dim // 2]], -1).unfold(-1, dim, 1)  # (..., D/2 + 1, D)
    twice = x.new_full((dim // 2 + 1, 1), (2 * square) ** 0.5)
    twice[0] = square**0.5
    pairs = (shifted * (x[..., None, :] * twice)).flatten(-2)[..., : dim * (dim + 1) // 2]
    return torch.cat([torch.full_like(x[..., :1], one**0.5), x * linear**0.5, pairs], -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    constant: float,
    taylor: bool,
    eps: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
    state: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalized attention with ``similarity`` s: o_i = sum_j s(q_i, k_j) v_j / (sum_j s(q_i, k_j) + eps).

    q (B,H,N,D), k (B,H,M,D), scaled already, in float32 or float64, v (B,H,M,E) -> o (B,H,N,E) in v's dtype, state
    (B,H,F,E+1) with F = (D+1)(D+2)/2: the sum of phi(k) v^T and, in its last column, of phi(k).

    mask (B,M) bool: True = a real token; segments (B,N) int64: packed sequences; prefix bool (B,N): tokens that see
    each other. Time is O(N D^2 E), memory that of one span and of one state for each span. ``donate=True`` may
    overwrite ``state``.
    """
    backend, kernel = select_backend(OP), {"constant": constant, "taylor": taylor}
    with torch.autocast(v.device.type, enabled=False):
        q, k, v, state = materialize_neg(q, k, v, state)
        values = zero_masked(mask, with_ones(upcast_half(v)))[0]
        if prefix is not None:
            folded = _total(k, values, prefix, **kernel)
            state, mask = folded if state is None else state + folded, ~prefix if mask is None else mask & ~prefix
        if not causal and segments is None:
            total = _total(k, values, mask, **kernel)
            return read(q, total, eps=eps, **kernel).to(v.dtype), total
        scan = _reference if backend == "reference" else _scan
        found, end = scan(q, k, values, mask, segments, state, donate and not transformed(), **kernel)
        if segments is not None and not causal:
            last = None if mask is None else mask.flip(1)
            later, _ = scan(q.flip(2), k.flip(2), values.flip(2), last, segments.flip(1), None, False, **kernel)
            # Both scans count the token itself, so it is taken out of one of them.
            own = similarity(q[..., None, :], k[..., None, :], **kernel)[..., 0]
            found = found + later.flip(2) - _masked(own, mask) * values
        return normalize(found, eps).to(v.dtype), end


def read(q: Tensor, sums: Tensor, *, constant: float, taylor: bool, eps: float) -> Tensor:
    """What queries (B,H,N,D) find in the sums (B,H,F,E+1) over all keys: (B,H,N,E) in the dtype of the sums."""

    def found(q: Tensor, sums: Tensor) -> Tensor:
        return features(q, constant, taylor) @ sums

    with torch.autocast(q.device.type, enabled=False):
        spans = q.split(_span(q, sums), 2)
        return normalize(torch.cat([_again(len(spans) > 1, found, part, sums) for part in spans], 2), eps)


def matrix(
    q: Tensor,
    k: Tensor,
    allowed: Tensor,
    *,
    constant: float,
    taylor: bool,
    eps: float,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """The weights (B,H,N,M) that ``attend`` gives to the keys of this call; allowed bool (B|1,1,N,M). O(N M) memory."""
    with torch.autocast(q.device.type, enabled=False):
        weights = similarity(q, k, constant, taylor) * allowed
        below = weights.sum(-1, keepdim=True)
        if state is not None:
            past = features(q, constant, taylor) @ state[..., -1:]
            below = below + (past if segments is None else past * (segments == segments[:, :1])[:, None, :, None])
        return normalize(torch.cat([weights, below], -1), eps)


def _reference(q, k, values, mask, segments, state, donate, constant, taylor):
    """All features at once, token by token."""
    keys = _masked(features(k, constant, taylor), mask)
    state = _empty(q, values) if state is None else state
    options = {"log_decay": None, "beta": None, "scale": 1.0, "mask": None, "segments": segments, "state": state}
    return gated.reference(features(q, constant, taylor), keys, values, **options)


def _scan(q, k, values, mask, segments, state, donate, constant, taylor):
    """Span by span: what is read (B,H,N,E+1), the state after the last token."""
    state = _empty(q, values) if state is None else state

    def span(q, k, values, mask, borders, state):
        scores = similarity(q, k, constant, taylor).tril()
        scores = scores if mask is None else scores.masked_fill(~mask[:, None, None, :], 0.0)
        queries, keys = features(q, constant, taylor), _masked(features(k, constant, taylor), mask)
        if borders is not None:
            same, first, last, whole = borders
            scores, queries, keys = scores * same, queries * first, keys * last
        found, written = scores @ values + queries @ state, keys.mT @ values
        if donate:
            return found, (state if borders is None else state.mul_(whole)).add_(written)
        return found, (state if borders is None else state * whole) + written

    found, width, n = [values[:, :, :0]], _span(q, values), q.shape[2]
    for start in range(0, n, width):
        rows = slice(start, min(start + width, n))
        borders = None
        if segments is not None:
            borders = tuple(t[:, :, 0] for t in borders_of(segments, start, 1, rows.stop - start, q))
        part = (q[:, :, rows], k[:, :, rows], values[:, :, rows], None if mask is None else mask[:, rows], borders)
        out, state = _again(n > width, span, *part, state)
        found.append(out)
    return torch.cat(found, 2), state


def _total(k, values, mask, constant, taylor):
    """The state (B,H,F,E+1) that all real keys make together."""

    def add(k, values, mask, state):
        return state + _masked(features(k, constant, taylor), mask).mT @ values

    state, width, n = _empty(k, values), _span(k, values), k.shape[2]
    for start in range(0, n, width):
        rows = slice(start, start + width)
        part = (k[:, :, rows], values[:, :, rows], None if mask is None else mask[:, rows])
        state = _again(n > width, add, *part, state)
    return state


def _again(many: bool, function: Callable, *arguments: Any) -> Any:
    """``function(*arguments)``; where it is one of many, what it makes inside is not kept but made again backwards."""
    if not many or not torch.is_grad_enabled() or transformed():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _span(x: Tensor, values: Tensor) -> int:
    """Tokens of a span: as many as make its similarities cost what its features do, within limits."""
    dim = x.shape[-1]
    return min(max((dim + 1) * (dim + 2) // 2 * values.shape[-1] // dim, SHORTEST), LONGEST)


def _empty(x: Tensor, values: Tensor) -> Tensor:
    dim = x.shape[-1]
    return values.new_zeros(*values.shape[:2], (dim + 1) * (dim + 2) // 2, values.shape[-1])


def _masked(rows: Tensor, mask: Tensor | None) -> Tensor:
    # phi(0) is not 0, so padding is removed after the feature map.
    return zero_masked(mask, rows)[0]
