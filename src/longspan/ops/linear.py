"""Normalised linear attention: phi(q)^T sum phi(k) v^T / (phi(q)^T sum phi(k) + eps)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import chosen, native, recurrence
from .features import MAPS, FeatureMap
from .features import feature_map as choose
from .heads import merge, split


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    feature_map: str | FeatureMap = "elu",
    eps: float = 1e-6,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    donate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention, shaped like ``F.scaled_dot_product_attention``.

    query (B,H,N,D), key (B,H,M,D), value (B,H,M,E) -> (B,H,N,E) in value's dtype; with ``return_state=True`` also the
    state (B,H,F,E+1), in float32 or float64: the sum of phi(k) v^T and, in its last column, the sum of phi(k).

    ``mask`` (B,M) bool: True = a real token; a masked key does not exist. ``segments`` (B,N) int64: packed sequences.
    ``causal=True`` needs N = M. ``donate=True`` may overwrite ``state``.

    Raises ValueError for shapes that do not fit, an unknown feature map or one that can go negative, and a state that
    is given with ``causal=False``.

    Source: Katharopoulos et al. 2020 (2006.16236), eqs 4-12. The state and all sums are float32 at least.
    """
    _check(query, key, value, causal, mask, segments, state)
    phi = choose(feature_map, query.shape[-1])
    q, k = phi(widen(query)), phi(widen(key))
    out, state = attend(q, k, value, causal=causal, eps=eps, mask=mask, segments=segments, state=state, donate=donate)
    return (out, state) if return_state else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    eps: float,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    numerator: tuple[Tensor, Tensor] | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same on features: q (B,H,N,F), k (B,H,M,F) in float32 or float64, v (B,H,M,E) in any dtype.

    ``numerator``: other features of queries and keys for the numerator (rotated ones), where the denominator must keep
    the positive ones. Returns o (B,H,N,E) in v's dtype and the state (B,H,F,E+1).
    """
    # phi(0) = 1, so padding is removed after the feature map, not before.
    real = None if mask is None else mask[:, None, :, None]
    with torch.autocast(q.device.type, enabled=False):
        if numerator is None:
            read, state = _sum(q, k, with_ones(widen(v)), causal, real, segments, state, donate)
        else:
            parts = (None, None) if state is None else (state[..., :-1], state[..., -1:])
            above, s = _sum(*numerator, widen(v), causal, real, segments, parts[0], False)
            below, z = _sum(q, k, torch.ones_like(k[..., :1]), causal, real, segments, parts[1], False)
            read, state = torch.cat([above, below], -1), torch.cat([s, z], -1)
        return normalise(read, eps).to(v.dtype), state


def step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, feature_map: str | FeatureMap, eps: float, donate: bool
) -> tuple[Tensor, Tensor]:
    """One token per sequence, its heads still side by side: what a decoder does most.

    q, k (B,1,H*D) before the feature map, v (B,1,H*E), state (B,H,F,E+1) -> o (B,1,H*E) in v's dtype, state.

    ``feature_map`` is a known name or a callable that has been checked.
    ``auto`` takes the native kernel where there is one for these operands. Raises ValueError where ``native`` is forced
    and there is none.
    """
    why_not = native.why_not(feature_map, q, k, v, state)
    match chosen("a token of linear attention", ("reference", "torch", "native"), "torch" if why_not else "native"):
        case "native":
            if why_not:
                raise ValueError(f"backend 'native' cannot serve this token of linear attention: {why_not}")
            state = state if donate else state.clone()
            return native.linear_step(q, k, v, state, feature_map=str(feature_map), eps=eps), state
        case _:
            heads = state.shape[1]
            phi = MAPS[feature_map] if isinstance(feature_map, str) else feature_map
            fq, fk = (phi(widen(split(t, heads))) for t in (q, k))
            o, state = attend(fq, fk, split(v, heads), causal=True, eps=eps, state=state, donate=donate)
            return merge(o), state


def _sum(q, k, v, causal, real, segments, state, donate):
    k = k if real is None else k * real
    if causal:
        return recurrence.scan(q, k, v, state, segments=segments, donate=donate)
    return recurrence.total(q, k, v, segments)


def matrix(q: Tensor, k: Tensor, allowed: Tensor, *, eps: float, state: Tensor | None = None, numerator=None) -> Tensor:
    """The weights (B,H,N,M) that ``attend`` gives to the keys of this call; allowed bool (B,1,N,M). O(N M) memory."""
    below = ((q @ k.mT) * allowed).sum(-1, keepdim=True) + eps
    if state is not None:
        below = below + q @ state[..., -1:]
    q, k = numerator or (q, k)
    return (q @ k.mT) * allowed / below


def widen(x: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def with_ones(v: Tensor) -> Tensor:
    """(..., E) -> (..., E+1): a last column of ones, whose weighted sum is the normaliser."""
    return F.pad(v, (0, 1), value=1.0)


def normalise(read: Tensor, eps: float) -> Tensor:
    """(..., E+1) -> (..., E): numerator / (denominator + eps); the denominator is the last column."""
    return read[..., :-1] / (read[..., -1:] + eps)


def _check(query, key, value, causal, mask, segments, state):
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() != 4 or not t.is_floating_point():
            raise ValueError(f"{name} must be a floating-point (B, H, N, D), not {t.dtype} {tuple(t.shape)}")
    if query.shape[:2] != key.shape[:2] or query.shape[-1] != key.shape[-1] or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit: "
            f"(B, H, N, D), (B, H, M, D), (B, H, M, E) are expected"
        )
    batch, _, keys, _ = key.shape
    if (causal or segments is not None) and query.shape[2] != keys:
        raise ValueError(f"causal or packed attention needs as many queries as keys, not {query.shape[2]} and {keys}")
    if mask is not None and (mask.shape != (batch, keys) or mask.dtype != torch.bool):
        raise ValueError(f"mask must be bool {(batch, keys)}, not {mask.dtype} {tuple(mask.shape)}")
    if segments is not None and segments.shape != (batch, keys):
        raise ValueError(f"segments must be {(batch, keys)}, not {tuple(segments.shape)}")
    if state is not None and not causal:
        raise ValueError("a state continues a causal sequence; causal=False sees all keys in one call and takes none")
    if state is not None and (state.shape[:2] != key.shape[:2] or state.shape[-1] != value.shape[-1] + 1):
        raise ValueError(f"state {tuple(state.shape)} does not fit: (B, H, F, E+1) with {tuple(value.shape)} as value")
