"""Attention with a polynomial of q.k in place of the exponential, exact and in linear time.

Its features are all products of two channels, 2145 for D = 64, or of four. They are computed for one span of tokens at
a time. Inside a span the similarity itself is cheaper. The backward pass recomputes the features of each span.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..._utils.constants import constant
from .. import gated
from ..backends import select_backend
from ..gated.decays import LOWEST
from ..operands import materialize_neg, transformed, zero_masked
from ..segments import borders_of
from ..tensors import upcast_half, with_ones
from . import normalize

OP = "polynomial attention"
SHORTEST, LONGEST = 64, 512  # tokens of a span


class Kernel(NamedTuple):
    """The weights ``similarity``, and what is added to the denominator."""

    constant: float  # added to q.k
    taylor: bool  # the Taylor polynomial of e^(q.k)
    eps: float

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the weights of all pairs: q (...,N,D), k (...,M,D) -> (...,N,M)."""
        return similarity(q, k, self.constant, self.taylor)

    def features(self, x: Tensor) -> Tensor:
        """Return phi with phi(q).phi(k) = similarity(q, k): (..., D) -> (..., F)."""
        return features(x, self.constant, self.taylor)

    def size(self, dim: int) -> int:
        """Return the number of features of D channels."""
        return (dim + 1) * (dim + 2) // 2


class Power(NamedTuple):
    """The weights (q.k)^degree, made by ``power``; methods as in ``Kernel``."""

    degree: int  # even
    eps: float
    halves: tuple[tuple[int, ...], ...]  # for each factor of half the degree, its channel in each product
    both: tuple[tuple[int, ...], ...]  # for each of the two halves, its number in each product
    scales: tuple[float, ...]  # the root of the number of orders of each product

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT) ** self.degree

    def features(self, x: Tensor) -> Tensor:
        """Return each product of ``degree`` channels once: (..., D) -> (..., F)."""
        # Channels are rows here, whose tokens are adjacent, since rows are selected faster than columns.
        rows = x.mT.contiguous()

        def chosen(rows: Tensor, numbers: tuple[int, ...]) -> Tensor:
            return rows.index_select(-2, constant(numbers, torch.int64, x.device))

        half = chosen(rows, self.halves[0])
        for channels in self.halves[1:]:
            half = half * chosen(rows, channels)
        first, second = (chosen(half, numbers) for numbers in self.both)
        return (first * second * constant(self.scales, x.dtype, x.device)[:, None]).mT

    def size(self, dim: int) -> int:
        return len(self.scales)


def power(dim: int, degree: int, eps: float) -> Power:
    """Return the weights (q.k)^degree of D channels, for an even degree."""
    chosen = itertools.combinations_with_replacement
    number = {half: i for i, half in enumerate(chosen(range(dim), degree // 2))}
    products = list(chosen(range(dim), degree))
    first, second = ([number[one[part]] for one in products] for part in (slice(degree // 2), slice(degree // 2, None)))
    equal = [math.prod(math.factorial(one.count(channel)) for channel in set(one)) for one in products]
    scales = ((math.factorial(degree) / orders) ** 0.5 for orders in equal)
    return Power(degree, eps, tuple(zip(*number, strict=True)), (tuple(first), tuple(second)), tuple(scales))


def similarity(q: Tensor, k: Tensor, constant: float, taylor: bool) -> Tensor:
    """Return (q.k + constant)^2, with ``taylor`` 1 + q.k + (q.k)^2 / 2: q (...,N,D), k (...,M,D) -> (...,N,M)."""
    products = q @ k.mT
    # A sum of squares, so that rounding cannot make it negative.
    return ((products + 1).square() + 1) / 2 if taylor else (products + constant).square()


def features(x: Tensor, constant: float, taylor: bool) -> Tensor:
    """Return phi with phi(q).phi(k) = similarity(q, k), each pair of channels once: (..., D) -> (..., (D+1)(D+2)/2).

    References:
        Katharopoulos et al. 2020 (2006.16236), section 3.2.1; with ``taylor`` Arora et al. 2024 (2402.18668).
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
    kernel: Kernel | Power,
    *,
    causal: bool,
    log_decay: Tensor | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
    state: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalized attention with ``similarity`` s: o_i = sum_j s(q_i, k_j) v_j / (sum_j s(q_i, k_j) + eps).

    With log decays, s is multiplied by the decays of the tokens after j up to i. Time is O(N F E), memory that of one
    span and of one state per span.

    Args:
        q: (B,H,N,D), already scaled, in float32 or float64.
        k: (B,H,M,D), already scaled, in float32 or float64.
        v: (B,H,M,E).
        kernel: The similarity s, and eps.
        causal: Each query sums over the keys up to its position.
        log_decay: (B,H,N), at most 0, only if causal and without a prefix.
        mask: (B,M) bool, True = a real token.
        segments: (B,N) int64, packed sequences.
        prefix: (B,N) bool, tokens that see each other.
        state: (B,H,F,E+1), or None for zeros.
        donate: Allows the call to overwrite ``state``.

    Returns:
        o (B,H,N,E) in v's dtype, and the state (B,H,F,E+1) for F features: the sum of phi(k) v^T and, in its last
        column, of phi(k).
    """
    backend = select_backend(OP)
    with torch.autocast(v.device.type, enabled=False):
        q, k, v, state = materialize_neg(q, k, v, state)
        values = zero_masked(mask, with_ones(upcast_half(v)))[0]
        if prefix is not None:
            folded = _total(k, values, prefix, kernel)
            state, mask = folded if state is None else state + folded, ~prefix if mask is None else mask & ~prefix
        if not causal and segments is None:
            total = _total(k, values, mask, kernel)
            return read(q, total, kernel).to(v.dtype), total
        scan = _reference if backend == "reference" else _scan
        found, end = scan(q, k, values, log_decay, mask, segments, state, donate and not transformed(), kernel)
        if segments is not None and not causal:
            last = None if mask is None else mask.flip(1)
            later, _ = scan(q.flip(2), k.flip(2), values.flip(2), None, last, segments.flip(1), None, False, kernel)
            # Both scans include the token itself, so it is subtracted once.
            own = kernel.similarity(q[..., None, :], k[..., None, :])[..., 0]
            found = found + later.flip(2) - _masked(own, mask) * values
        return normalize(found, kernel.eps).to(v.dtype), end


def read(q: Tensor, sums: Tensor, kernel: Kernel | Power) -> Tensor:
    """Read the sums (B,H,F,E+1) over all keys with queries (B,H,N,D) -> (B,H,N,E) in the dtype of the sums."""

    def found(q: Tensor, sums: Tensor) -> Tensor:
        return kernel.features(q) @ sums

    with torch.autocast(q.device.type, enabled=False):
        spans = q.split(_span(q, sums, kernel), 2)
        return normalize(torch.cat([_again(len(spans) > 1, found, part, sums) for part in spans], 2), kernel.eps)


def matrix(
    q: Tensor, k: Tensor, allowed: Tensor, kernel: Kernel, segments: Tensor | None = None, state: Tensor | None = None
) -> Tensor:
    """Return the weights (B,H,N,M) of ``attend`` on the keys of a call; allowed bool (B|1,1,N,M). O(N M) memory."""
    with torch.autocast(q.device.type, enabled=False):
        weights = kernel.similarity(q, k) * allowed
        below = weights.sum(-1, keepdim=True)
        if state is not None:
            past = kernel.features(q) @ state[..., -1:]
            below = below + (past if segments is None else past * (segments == segments[:, :1])[:, None, :, None])
        return normalize(torch.cat([weights, below], -1), kernel.eps)


def _reference(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    state: Tensor | None,
    donate: bool,
    kernel: Kernel | Power,
) -> tuple[Tensor, Tensor]:
    """The recurrence on the features of all tokens, token by token."""
    keys, queries = _masked(kernel.features(k), mask), kernel.features(q)
    (log_decay,) = zero_masked(mask, log_decay)
    state = _empty(q, values, kernel) if state is None else state
    return gated.definition.attend(gated.Recurrence(queries, keys, values, log_decay, None, state, segments=segments))


def _scan(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    state: Tensor | None,
    donate: bool,
    kernel: Kernel | Power,
) -> tuple[Tensor, Tensor]:
    """Scan span by span -> the sums that are read (B,H,N,E+1), the state after the last token."""
    end = _empty(q, values, kernel) if state is None else state
    (log_decay,) = zero_masked(mask, log_decay)

    def span(
        q: Tensor,
        k: Tensor,
        values: Tensor,
        log_decay: Tensor | None,
        mask: Tensor | None,
        borders: tuple[Tensor, ...] | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        scores = kernel.similarity(q, k).tril()
        scores = scores if mask is None else scores.masked_fill(~mask[:, None, None, :], 0.0)
        queries, keys = kernel.features(q), _masked(kernel.features(k), mask)
        whole = None
        if borders is not None:
            same, first, last, whole = borders
            scores, queries, keys = scores * same, queries * first, keys * last
        if log_decay is not None:
            # Differences of sums keep their digits in float64.
            total = log_decay.double().clamp(min=LOWEST).cumsum(-1)[..., None]
            lower = torch.ones_like(scores, dtype=torch.bool).tril()
            scores = scores * (total - total.mT).masked_fill(~lower, -torch.inf).exp().to(scores)
            queries, keys = queries * total.exp().to(q), keys * (total[..., -1:, :] - total).exp().to(q)
            left = total[..., -1:, :].exp().to(q)
            whole = left if whole is None else whole * left
        found, written = scores @ values + queries @ state, keys.mT @ values
        if donate:
            return found, (state if whole is None else state.mul_(whole)).add_(written)
        return found, (state if whole is None else state * whole) + written

    found, width, n = [values[:, :, :0]], _span(q, values, kernel), q.shape[2]
    for start in range(0, n, width):
        rows = slice(start, min(start + width, n))
        borders = None
        if segments is not None:
            borders = tuple(t[:, :, 0] for t in borders_of(segments, start, 1, rows.stop - start, q))
        decays = None if log_decay is None else log_decay[:, :, rows]
        hidden = None if mask is None else mask[:, rows]
        part = (q[:, :, rows], k[:, :, rows], values[:, :, rows], decays, hidden, borders)
        out, end = _again(n > width, span, *part, end)
        found.append(out)
    return torch.cat(found, 2), end


def _total(k: Tensor, values: Tensor, mask: Tensor | None, kernel: Kernel | Power) -> Tensor:
    """Return the state (B,H,F,E+1) of all real keys."""

    def add(k: Tensor, values: Tensor, mask: Tensor | None, state: Tensor) -> Tensor:
        return state + _masked(kernel.features(k), mask).mT @ values

    state, width, n = _empty(k, values, kernel), _span(k, values, kernel), k.shape[2]
    for start in range(0, n, width):
        rows = slice(start, start + width)
        part = (k[:, :, rows], values[:, :, rows], None if mask is None else mask[:, rows])
        state = _again(n > width, add, *part, state)
    return state


def _again(many: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``; if it is one of many, the backward pass recomputes its intermediates."""
    if not many or not torch.is_grad_enabled() or transformed():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _span(x: Tensor, values: Tensor, kernel: Kernel | Power) -> int:
    """Return the tokens of a span, for which similarities cost as much as features, within limits."""
    dim = x.shape[-1]
    return min(max(kernel.size(dim) * values.shape[-1] // dim, SHORTEST), LONGEST)


def _empty(x: Tensor, values: Tensor, kernel: Kernel | Power) -> Tensor:
    return values.new_zeros(*values.shape[:2], kernel.size(x.shape[-1]), values.shape[-1])


def _masked(rows: Tensor, mask: Tensor | None) -> Tensor:
    # phi(0) is not 0, so padding is removed after the feature map.
    return zero_masked(mask, rows)[0]
