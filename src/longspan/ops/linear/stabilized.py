"""Linear attention on features that may overflow or change sign: shifted exponents, and a bounded denominator.

Key features e^a_tr are divided by e^mu_t, where mu_t is the largest exponent of the keys so far. When mu increases, the
sums are divided by the same factor: S_t = e^(mu_{t-1} - mu_t) S_{t-1} + e^(a_t - mu_t) v_t^T is the recurrence with a
decay per head, and it is causal. Query features are divided by their largest. Both divisions cancel in the ratio of
numerator and denominator, so the shifts need no gradients, except where eps bounds the denominator.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import gated
from .. import prefix as prefixes
from ..operands import zero_masked
from ..shards import active_shards
from ..tensors import upcast_half, with_ones
from . import recurrence
from .random_features import Parts


class Sums(NamedTuple):
    """The state: sums over all keys so far."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T, divided by e^peak; last column: sum of phi(k)
    peak: Tensor | None  # (B,H) their largest exponent, -inf before the first key; None for features without exponents


def attend(
    q: Parts,
    k: Parts,
    v: Tensor,
    *,
    causal: bool,
    eps: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
    state: Sums | None = None,
    donate: bool = False,
) -> tuple[Tensor, Sums]:
    """Linear attention on features with exponents.

    Args:
        q: (B,H,N,F), features in float32 or float64.
        k: (B,H,M,F), features in float32 or float64.
        v: (B,H,M,E).
        causal: Each query sums over the keys up to its position.
        eps: Bounds the denominator after the divisions by the largest exponents; see ``divide``.
        mask: (B,M) bool, True = a real token.
        segments: (B,N) int64, packed sequences.
        prefix: (B,N) bool, tokens that see each other, from ``prefix.inside``.
        state: The sums of earlier calls, or None.
        donate: Allows the call to overwrite ``state``.

    Returns:
        o (B,H,N,E) in v's dtype and the sums.
    """
    if (shards := active_shards()) is not None and k.exponent is not None:
        return shards.stabilized(attend, q, k, v, causal=causal, eps=eps, mask=mask, segments=segments, state=state)
    with torch.autocast(v.device.type, enabled=False):
        values = with_ones(upcast_half(v))
        if prefix is not None:
            state, mask = _folded(k, values, prefix, state, mask)
        values = zero_masked(mask, values)[0]
        sums, start = state or (None, None)
        queries, decay, peak = _queries(q), None, None
        if k.exponent is None:
            keys = zero_masked(mask, k.features())[0]
        else:
            after = shifts(k, causal=causal, mask=mask, segments=segments, start=start)
            keys = _shifted(k, after, mask)
            if causal:
                decay, peak = _decay(after, segments, start)
        # A masked key is zero and has no decay, so the recurrence needs no mask.
        if not causal:
            found, sums = recurrence.total(queries, keys, values, segments)
        elif decay is None:
            found, sums = recurrence.scan(queries, keys, values, sums, segments=segments, donate=donate)
        else:
            options: gated.RecurrenceOptions = {"log_decay": decay, "scale": 1.0, "segments": segments, "state": sums}
            found, sums = gated.recur(queries, keys, values, **options, donate=donate)
        return divide(found, eps).to(v.dtype), Sums(sums, peak)


def read(q: Parts, sums: Tensor, *, eps: float) -> Tensor:
    """Read the sums (B,H,F,E+1) over all keys with queries (B,H,N,F) -> (B,H,N,E) in the dtype of the sums."""
    with torch.autocast(sums.device.type, enabled=False):
        return divide(_queries(q) @ sums, eps)


def divide(found: Tensor, eps: float) -> Tensor:
    """Return numerator / (sign(d) max(|d|, eps)), where d is the last column: (..., E+1) -> (..., E); sign(0) = 1.

    A bound instead of d + eps, since a sum of products of both signs may be -eps. Where the bound is not reached, the
    ratio and its gradient do not depend on the shift.
    """
    below = found[..., -1:]
    return found[..., :-1] / (torch.where(below < 0, -1.0, 1.0) * below.abs().clamp(min=eps))


def matrix(
    q: Parts,
    k: Parts,
    allowed: Tensor,
    *,
    causal: bool,
    eps: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
    state: Sums | None = None,
) -> Tensor:
    """Return the weights (B,H,N,M) of ``attend`` on the keys of a call; allowed bool (B|1,1,N,M). O(N M) memory."""
    with torch.autocast(allowed.device.type, enabled=False):
        queries, lost = _queries(q), None
        if k.exponent is None:
            weights = (queries @ k.features().mT) * allowed
        else:
            start = None if state is None else state.peak
            if prefix is not None:
                start, mask = _prefix_peak(k, prefix, start), ~prefix if mask is None else mask & ~prefix
            after = shifts(k, causal=causal, mask=mask, segments=segments, start=start)[..., None]
            drops = (k.peak()[..., None, :] - after).masked_fill(~allowed, -torch.inf)
            weights = (queries @ k.features(k.peak()).mT) * drops.exp()
            lost = None if state is None or state.peak is None else _drop(state.peak[..., None, None], after).exp()
        below = weights.sum(-1, keepdim=True)
        if state is not None:
            past = queries @ state.sums[..., -1:]
            past = past if lost is None else past * lost
            first = None if segments is None else (segments == segments[:, :1])[:, None, :, None]
            below = below + (past if first is None else past * first)
        return divide(torch.cat([weights, below], -1), eps)


def shifts(
    k: Parts, *, causal: bool, mask: Tensor | None, segments: Tensor | None, start: Tensor | None = None
) -> Tensor:
    """Return the largest exponent of the keys that each query sees: (B,H,N), or (B,H,1) if all see the same keys.

    ``start`` (B,H) is the largest exponent before this call, for the first segment. It is -inf without keys.
    """
    own = k.peak() if mask is None else k.peak().masked_fill(~mask[:, None], -torch.inf)  # (B,H,M)
    if not causal:
        if segments is None:
            return F.pad(own, (1, 0), value=-torch.inf).amax(-1, keepdim=True)
        return _running(_running(own, segments).flip(-1), segments.flip(1)).flip(-1)
    after = _running(own, segments)
    if start is None:
        return after
    first = start[..., None]
    if segments is not None:
        first = first.masked_fill((segments != segments[:, :1])[:, None], -torch.inf)
    return torch.maximum(after, first)


def _running(own: Tensor, segments: Tensor | None) -> Tensor:
    """Running maximum over the last axis (B,H,N) within each segment: log2(N) passes of doubled width."""
    if segments is None:
        return own.cummax(-1).values
    width, n = 1, own.shape[-1]
    while width < n:
        apart = (segments[:, width:] != segments[:, :-width])[:, None]
        further = torch.maximum(own[..., width:], own[..., :-width].masked_fill(apart, -torch.inf))
        own, width = torch.cat([own[..., :width], further], -1), 2 * width
    return own


def _decay(after: Tensor, segments: Tensor | None, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log decay of the state before each token (B,H,N), and the last peak (B,H)."""
    if start is None:
        start = after.new_full(after.shape[:2], -torch.inf)
    running = torch.cat([start[..., None], after], -1)
    before = running[..., :-1]
    if segments is not None:
        border = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))[:, None]
        before = before.masked_fill(border, -torch.inf)
    return _drop(before, after), running[..., -1]


def _drop(before: Tensor, after: Tensor) -> Tensor:
    """Return before - after, and 0 if nothing was summed before, since -inf - -inf is NaN."""
    return torch.where(before == -torch.inf, 0.0, before - after)


def _queries(q: Parts) -> Tensor:
    return q.features() if q.exponent is None else q.features(q.peak())


def _shifted(k: Parts, shift: Tensor, mask: Tensor | None) -> Tensor:
    """Return key features (B,H,M,F) / e^shift, 0 for masked keys, whose exponents are masked before they overflow."""
    assert k.exponent is not None
    if mask is not None:
        k = k._replace(exponent=k.exponent.masked_fill(~mask[:, None, :, None], -torch.inf))
    return zero_masked(mask, k.features(shift.masked_fill(shift == -torch.inf, 0.0)))[0]


def total(k: Parts, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums (B,H,F,E+1) of keys k (B,H,M,F) and values v (B,H,M,E), and their peak (B,H)."""
    peak = shifts(k, causal=False, mask=mask, segments=None)[..., 0]
    values = zero_masked(mask, with_ones(upcast_half(v)))[0]
    return _shifted(k, peak[..., None], mask).mT @ values, peak


def rescaled(sums: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return sums (B,H,F,E+1), divided by e^before, divided by e^after instead; both (B,H)."""
    return sums * _drop(before, after).exp()[..., None, None]


def _prefix_peak(k: Parts, prefix: Tensor, start: Tensor | None) -> Tensor:
    """Return the largest exponent (B,H) of the keys of the prefix and of earlier calls."""
    top = shifts(k, causal=False, mask=prefix, segments=None)[..., 0]
    return top if start is None else torch.maximum(top, start)


def _folded(k: Parts, values: Tensor, prefix: Tensor, state: Sums | None, mask: Tensor | None) -> tuple[Sums, Tensor]:
    """Return the state and the mask that run a call in prefix mode; see ``prefix.fold``."""
    sums, start = state or (None, None)
    if k.exponent is None:
        folded, rest = prefixes.fold(k.features(), values, prefix, sums, mask)
        return Sums(folded, None), rest
    top = _prefix_peak(k, prefix, start)
    if sums is not None and start is not None:
        sums = sums * _drop(start, top).exp()[..., None, None]
    folded, rest = prefixes.fold(_shifted(k, top[..., None], prefix), values, prefix, sums, mask)
    return Sums(folded, top), rest
