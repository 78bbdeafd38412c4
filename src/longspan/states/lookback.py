"""Attention under a pattern: whole sequences by blocks, and a state as large as the look-back."""

from typing import Any

import torch
from torch import Tensor

from ..ops import sparse
from ..ops.softmax.dense import repeat
from ..ops.sparse import Bias, Logits
from ..ops.tensors import positions
from ..patterns import Pattern
from . import kv_cache, window
from .kv_cache import KeyValues
from .window import Window, WindowView

STATES = (Window, KeyValues)
AT_ONCE = 512  # new tokens of a call that attend to a state together

__all__ = ["STATES", "attend", "empty"]


def empty(pattern: Pattern, batch: int, heads: int, capacity: int, dim: int, like: Tensor) -> Window | KeyValues:
    """Return the state before the first token: a window for a bounded look-back, else a KV cache."""
    if pattern.lookback is None:
        return kv_cache.empty(batch, heads, capacity, dim, like)
    return window.empty(batch, heads, pattern.lookback + 1, dim, like)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Window | KeyValues | None,
    pattern: Pattern,
    *,
    layer: int = 0,
    bias: Bias | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    record: dict[str, Any] | None = None,
    donate: bool = False,
) -> tuple[Tensor, Any]:
    """Attend under a pattern, for a whole sequence or after a state.

    Args:
        q: (B,H,N,D) queries.
        k: (B,G,N,D) keys; G divides H.
        v: (B,G,N,E) values.
        state: The state before these tokens, or None for whole sequences. A pattern with look-ahead needs None.
        pattern: The keys that each query sees.
        layer: The number of the layer, for patterns that differ by layer.
        bias: Added to the logits.
        scale: Factor of the logits; None: 1 / sqrt(D).
        mask: (B,N) bool, True on real tokens.
        segments: (B,N) int64, the sequence of each token in a packed row.
        record: Gets ``matrix``, ``mask`` and ``lse``, each O(N M).
        donate: Allow the state to be overwritten.

    Returns:
        The output (B,H,N,E) and the next state, None without a state. Without a state, memory is O(N keys-per-query);
        with one, tokens are processed in parts that keep it small.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    how = Logits(scale, bias, layer)
    if state is None:
        o = sparse.attend(q, k, v, pattern, mask=mask, segments=segments, bias=bias, scale=scale, layer=layer)
        if record is not None:
            at, _ = positions(q.transpose(1, 2), mask=mask, segments=segments)
            seen = _real(mask, segments, at)
            _record(record, q, WindowView(k, v, at, at, seen), pattern, how)
        return o, None
    n, outs = q.shape[2], []
    if _from_nothing(state, n, mask, segments, record):
        o = sparse.attend(q, k, v, pattern, bias=bias, scale=scale, layer=layer)
        if isinstance(state, Window):
            return o, window.tail(state, k, v)
        return o, kv_cache.extend(state, k, v, donate=donate)[1]
    together = n if segments is not None or record is not None else AT_ONCE
    for start in range(0, n, together) or [0]:
        part = slice(start, start + together)
        own = None if mask is None else mask[:, part]
        packed = None if segments is None else segments[:, part]
        view, state = _extend(state, k[:, :, part], v[:, :, part], own, packed, donate or start > 0)
        if record is not None:
            _record(record, q, view, pattern, how)
        outs.append(_read(q[:, :, part], view, pattern, how))
    return torch.cat(outs, 2), state


def _from_nothing(
    state: Window | KeyValues, n: int, mask: Tensor | None, segments: Tensor | None, record: dict[str, Any] | None
) -> bool:
    """Whether a prompt can be read as a whole sequence: the state is empty, and there is no mask or packing."""
    given = mask is not None or segments is not None or record is not None
    if n == 1 or given or torch.compiler.is_compiling():
        return False
    before = state.position if isinstance(state, Window) else state.length
    return not bool(before.any())


def _real(mask: Tensor | None, segments: Tensor | None, at: Tensor) -> Tensor:
    """Which tokens of one call are real and in the same sequence, bool (B,N,N)."""
    batch, n = at.shape
    seen = torch.ones(batch, n, n, dtype=torch.bool, device=at.device) if mask is None else mask[:, None, :]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    return seen.expand(batch, n, n)


def _extend(
    state: Any, k: Tensor, v: Tensor, mask: Tensor | None, segments: Tensor | None, donate: bool
) -> tuple[WindowView, Any]:
    if isinstance(state, Window):
        return window.extend(state, k, v, mask=mask, segments=segments, donate=donate)
    at, _ = positions(k.transpose(1, 2), state.length, mask=mask, segments=segments)
    n, before = k.shape[2], state.keys.shape[2]
    view, after = kv_cache.extend(state, k, v, mask=mask, segments=segments, donate=donate)
    slots = torch.arange(view.keys.shape[2], device=k.device).expand(len(k), -1)
    if segments is not None:
        # Packed rows: the old slots, which are positions, then the new tokens at their positions.
        slots = torch.cat([slots[:, :before], at], 1)
    return WindowView(view.keys, view.values, at, slots, view.allowed(n).expand(len(k), 1, n, -1)[:, 0]), after


def _read(q: Tensor, view: WindowView, pattern: Pattern, how: Logits) -> Tensor:
    allowed = sparse.allowed_at(pattern, view.at, view.slots, q.shape[1], how.layer) & view.visible[:, None]
    q = q.to(view.keys.dtype)
    keys, values = (repeat(x, q.shape[1]) if how.bias is not None else x for x in (view.keys, view.values))
    return sparse.by_rows(q, keys, values, allowed, view.at, view.slots, how)


def _record(record: dict[str, Any], q: Tensor, view: WindowView, pattern: Pattern, how: Logits) -> None:
    allowed = sparse.allowed_at(pattern, view.at, view.slots, q.shape[1], how.layer) & view.visible[:, None]
    matrix, lse = sparse.matrix(q, repeat(view.keys, q.shape[1]), allowed, view.at, view.slots, how)
    record.update(mask=allowed, matrix=matrix, lse=lse)
