"""Attention with a polynomial of q.k in place of the exponential, exact and in linear time.

Its features are all products of two channels, 2145 for D = 64, or of four. They are computed for one span of tokens at
a time. Inside a span the similarity itself is cheaper. The backward pass computes each span again.
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
from ..backends import choose_backend
from ..gated.decays import LOWEST
from ..operands import materialize_neg, transformed, zero_masked
from ..segments import borders_of
from ..tensors import upcast_half, with_ones
from . import normalize, products
from .products import Products

OP, SERVED = "polynomial attention", ("reference", "torch", "native")
SHORTEST, LONGEST = 64, 256  # tokens of a span


class Kernel(NamedTuple):
    """The weights (q.k + constant)^degree, or the Taylor polynomial of e^(q.k); made by ``polynomial`` or ``power``."""

    degree: int  # 2 or 4
    constant: float | None  # added to q.k; None: nothing, and no products with it
    taylor: bool
    eps: float  # added to the denominator
    halves: tuple[tuple[int, ...], ...]  # for degree 4, the two channels of each product of two
    pairs: tuple[int, ...]  # the first factors of all features, then the second ones
    scales: tuple[float, ...]  # the root of the number of orders of each product

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the weights of all pairs: q (...,N,D), k (...,M,D) -> (...,N,M)."""
        found = q @ k.mT
        # A sum of squares, so that rounding cannot make it negative.
        return ((found + 1).square() + 1) / 2 if self.taylor else (found + (self.constant or 0.0)) ** self.degree

    def rows(self, x: Tensor) -> Tensor:
        """Return the factors of the features: (...,N,D) -> (...,P,N)."""
        rows = x.mT * 0.5**0.25 if self.taylor else x.mT
        if self.constant is not None:
            # Another channel, since (q.k + c)^2 is the square of a product with one more term.
            one = 0.5**0.25 if self.taylor else self.constant**0.5
            rows = torch.cat([rows, torch.full_like(rows[..., :1, :], one)], -2)
        if not self.halves:
            return rows
        first, second = (rows.index_select(-2, constant(one, torch.int64, x.device)) for one in self.halves)
        return first * second

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pairs (2,F) and the scales (F) of ``Products``."""
        pairs = constant(self.pairs, torch.int32, x.device).view(2, -1)
        return pairs, constant(self.scales, x.dtype, x.device)

    def features(self, x: Tensor) -> Tensor:
        """Return phi with phi(q).phi(k) = similarity(q, k): (...,N,D) -> (...,N,F)."""
        return products.features(self.rows(x), *self.tables(x)).mT

    @property
    def size(self) -> int:
        """The number F of features."""
        return len(self.scales)


def polynomial(dim: int, constant: float, taylor: bool, eps: float) -> Kernel:
    """Return the weights (q.k + constant)^2 of D channels, or with ``taylor`` 1 + q.k + (q.k)^2 / 2.

    References:
        Katharopoulos et al. 2020 (2006.16236), section 3.2.1; with ``taylor`` Arora et al. 2024 (2402.18668).
    """
    # The constant and its products, then channel i and channel i + j on a ring, for j up to D / 2; for even D the
    # second half of the last j repeats it.
    ring = [((i + j) % dim, i) for j in range(dim // 2 + 1) for i in range(dim)][: dim * (dim + 1) // 2]
    pairs = [(dim, dim), *((dim, i) for i in range(dim)), *ring]
    scales = [1.0 if a == b else 2**0.5 for a, b in pairs]
    scales[0] = 2**0.5 if taylor else 1.0  # (q.k + 1)^2 / 2 lacks a half
    return Kernel(2, constant, taylor, eps, (), (*(a for a, _ in pairs), *(b for _, b in pairs)), tuple(scales))


def power(dim: int, degree: int, eps: float) -> Kernel:
    """Return the weights (q.k)^degree of D channels, for a degree of 2 or 4."""
    chosen = itertools.combinations_with_replacement
    halves = list(chosen(range(dim), degree // 2))
    number = {half: i for i, half in enumerate(halves)}
    found = list(chosen(range(dim), degree))
    pairs = [number[one[part]] for part in (slice(degree // 2), slice(degree // 2, None)) for one in found]
    equal = [math.prod(math.factorial(one.count(channel)) for channel in set(one)) for one in found]
    scales = ((math.factorial(degree) / orders) ** 0.5 for orders in equal)
    factors = tuple(zip(*halves, strict=True)) if degree > 2 else ()
    return Kernel(degree, None, False, eps, factors, tuple(pairs), tuple(scales))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel,
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
    with torch.autocast(v.device.type, enabled=False):
        q, k, v, state = materialize_neg(q, k, v, state)
        values = with_ones(upcast_half(v))
        why_not = products.why_not(q, k, values, *([] if state is None else [state]))
        backend = choose_backend(OP, SERVED, {"native": why_not})
        # phi(0) may not be 0, but values of 0 write nothing.
        k, values = zero_masked(mask, k, values)
        if prefix is not None:
            (folded,) = zero_masked(prefix, values)
            folded = _total(k, folded, kernel, backend)
            state = folded if state is None else state + folded
            k, values, log_decay = zero_masked(~prefix, k, values, log_decay)
        if not causal and segments is None:
            total = _total(k, values, kernel, backend)
            return read(q, total, kernel).to(v.dtype), total
        (log_decay,) = zero_masked(mask, log_decay)
        given = _Call(q, k, values, log_decay, segments)
        start = values.new_zeros(*values.shape[:2], kernel.size, values.shape[-1]) if state is None else state
        donate = donate and not transformed()
        if backend == "reference":
            found, end = _reference(given, start, kernel)
        else:
            found, end = _scan(given, start, donate, kernel, backend)
        if segments is not None and not causal:
            back = _Call(q.flip(2), k.flip(2), values.flip(2), None, segments.flip(1))
            later = _scan(back, torch.zeros_like(start), False, kernel, backend)[0]
            # Both scans include the token itself, so it is subtracted once.
            own = kernel.similarity(q[..., None, :], k[..., None, :])[..., 0]
            found = found + later.flip(2) - own * values
        return normalize(found, kernel.eps).to(v.dtype), end


def read(q: Tensor, sums: Tensor, kernel: Kernel) -> Tensor:
    """Read the sums (B,H,F,E+1) over all keys with queries (B,H,N,D) -> (B,H,N,E) in the dtype of the sums."""
    with torch.autocast(q.device.type, enabled=False):
        run = _products(choose_backend(OP, SERVED, {"native": products.why_not(q, sums)}))
        tables, none = kernel.tables(q), sums[:, :, :0]

        def found(q: Tensor, sums: Tensor) -> Tensor:
            rows = kernel.rows(q)
            return run(Products(rows, rows[..., :0], none, sums, *tables))[0]

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


class _Call(NamedTuple):
    """Operands of a scan; keys and values are 0 at masked tokens."""

    q: Tensor  # (B,H,N,D)
    k: Tensor  # (B,H,N,D)
    values: Tensor  # (B,H,N,E+1)
    log_decay: Tensor | None  # (B,H,N)
    segments: Tensor | None  # (B,N)


def _reference(r: _Call, state: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """The recurrence on the features of all tokens, token by token."""
    queries, keys = kernel.features(r.q), kernel.features(r.k)
    given = gated.Recurrence(queries, keys, r.values, r.log_decay, None, state, segments=r.segments)
    return gated.definition.attend(given)


def _products(backend: str) -> Callable[[Products], tuple[Tensor, Tensor]]:
    return products.native if backend == "native" else products.composed


def _scan(r: _Call, state: Tensor, donate: bool, kernel: Kernel, backend: str) -> tuple[Tensor, Tensor]:
    """Scan span by span -> the sums that are read (B,H,N,E+1), the state after the last token."""
    tables, run, n = kernel.tables(r.q), _products(backend), r.q.shape[2]
    if n == 1 and backend == "native":
        left = None if r.log_decay is None else r.log_decay.clamp(min=LOWEST).exp()
        one = Products(kernel.rows(r.q), kernel.rows(r.k), r.values, state, *tables)
        if (result := products.step(one, left, donate)) is not None:
            return result

    def span(
        q: Tensor,
        k: Tensor,
        values: Tensor,
        log_decay: Tensor | None,
        borders: tuple[Tensor, ...] | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        scores, seen, late, whole = kernel.similarity(q, k).tril(), None, values, None
        if borders is not None:
            same, seen, last, whole = borders
            scores, late = scores * same, late * last
        if log_decay is not None:
            # Differences of sums keep their digits in float64.
            total = log_decay.double().clamp(min=LOWEST).cumsum(-1)[..., None]
            lower = torch.ones_like(scores, dtype=torch.bool).tril()
            scores = scores * (total - total.mT).to(q).masked_fill(~lower, -torch.inf).exp()
            begin, left = total.exp().to(q), total[..., -1:, :].exp().to(q)
            seen, late = begin if seen is None else seen * begin, late * (total[..., -1:, :] - total).exp().to(q)
            whole = left if whole is None else whole * left
        far, written = run(Products(kernel.rows(q), kernel.rows(k), late, state, *tables))
        found = scores @ values + (far if seen is None else far * seen)
        if donate:
            return found, (state if whole is None else state.mul_(whole)).add_(written)
        return found, (state if whole is None else state * whole) + written

    found, width = [r.values[:, :, :0]], _span(r.q, r.values, kernel)
    for start in range(0, n, width):
        rows = slice(start, min(start + width, n))
        borders = None
        if r.segments is not None:
            borders = tuple(t[:, :, 0] for t in borders_of(r.segments, start, 1, rows.stop - start, r.q))
        decays = None if r.log_decay is None else r.log_decay[:, :, rows]
        part = (r.q[:, :, rows], r.k[:, :, rows], r.values[:, :, rows], decays, borders)
        out, state = _again(n > width, span, *part, state)
        found.append(out)
    return torch.cat(found, 2), state


def _total(k: Tensor, values: Tensor, kernel: Kernel, backend: str) -> Tensor:
    """Return the state (B,H,F,E+1) of all keys whose values are not 0."""
    tables, run = kernel.tables(k), _products(backend)

    def add(k: Tensor, values: Tensor, state: Tensor) -> Tensor:
        rows = kernel.rows(k)
        return state + run(Products(rows[..., :0], rows, values, state, *tables))[1]

    width, n = _span(k, values, kernel), k.shape[2]
    state = values.new_zeros(*values.shape[:2], kernel.size, values.shape[-1])
    for start in range(0, n, width):
        rows = slice(start, start + width)
        state = _again(n > width, add, k[:, :, rows], values[:, :, rows], state)
    return state


def _again(many: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``; if it is one of many, the backward pass recomputes its intermediates."""
    if not many or not torch.is_grad_enabled() or transformed():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _span(x: Tensor, values: Tensor, kernel: Kernel) -> int:
    """Return the tokens of a span, for which similarities cost as much as features, within limits."""
    return min(max(kernel.size * values.shape[-1] // x.shape[-1], SHORTEST), LONGEST)
