"""Normalized linear attention: phi(q)^T sum phi(k) v^T / (phi(q)^T sum phi(k) + eps)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from .. import forms, prefix
from ..arguments import check_operands, check_state
from ..forms import Form, Forms
from ..isolated import Packed, Part, isolated
from ..operands import check_donation, check_eps, materialize_neg, transformed, zero_masked
from ..tensors import upcast_half, wide_dtype, with_ones
from . import bidirectional, composed, native, recurrence, triton
from . import causal as causally
from .features import MAPS, FeatureMap, divisors
from .features import feature_map as choose
from .operands import LinearCall, LinearOperands, LinearOptions

SHAPES = {"query": "B H N D", "key": "B H M D", "value": "B H M E", "mask": "B M"}


@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_state: Literal[False] = False, **options: Unpack[LinearOptions]
) -> Tensor: ...


@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_state: Literal[True], **options: Unpack[LinearOptions]
) -> tuple[Tensor, Tensor]: ...


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
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    donate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Linear attention, shaped like ``F.scaled_dot_product_attention``.

    $$
    o_i = \frac{S_i^\top \phi(q_i)}{z_i \cdot \phi(q_i) + \epsilon}, \quad S_i = \sum_{j \le i} \phi(k_j) v_j^\top,
    \quad z_i = \sum_{j \le i} \phi(k_j)
    $$

    The default is ``causal=True``; ``F.scaled_dot_product_attention`` has ``is_causal=False``. The state and all sums
    are float32 at least. Transforms of ``torch.func`` and forward-mode derivatives use plain torch operations.

    Args:
        query: (B,H,N,D).
        key: (B,H,M,D).
        value: (B,H,M,E).
        causal: Each query sums over the keys up to its position; requires N = M. False sums over all keys.
        feature_map: $\phi$: ``elu``, ``relu``, ``squared_relu`` or ``exp``, or a callable (..., D) -> (..., F) without
            negative values.
        eps: $\epsilon$, added to the denominator. A query whose denominator is 0 gets 0, also with ``eps=0``.
        mask: (B,M) bool, True = a real token. Masked keys are ignored completely, even if they hold NaN. With
            ``causal=True`` the outputs of masked tokens are arbitrary.
        segments: (B,N) int64, packed sequences. Equal ids are adjacent.
        cu_seqlens: (S+1,) int32 or int64, offsets of S sequences that are packed into one row, B = 1: sequence s is
            tokens cu_seqlens[s] ... cu_seqlens[s+1], and has a separate state.
        state: (B,H,F,E+1), or (S,H,F,E+1) with cu_seqlens, from an earlier causal call. None starts from zeros.
        return_state: Also returns the state after the last token.
        donate: Allows the call to overwrite ``state``.

    Returns:
        The output (B,H,N,E) in value's dtype. With ``return_state=True`` also the state in float32 or float64, of the
        shape of ``state``: $S$ and, in its last column, $z$.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or segments and cu_seqlens are both given; the feature map
            is unknown or has negative values; a state is given with ``causal=False``; or a donated state shares memory
            with query, key, value or itself.

    Example:
        >>> import torch, longspan
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)  # (B,H,N,D) each
        >>> longspan.linear_attention(q, k, v, causal=True).shape
        torch.Size([1, 2, 5, 8])

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 4-12.
    """
    check_eps(eps)
    if donate and state is not None:
        check_donation(state, query=query, key=key, value=value)
    unpacked = segments is None and cu_seqlens is None
    if causal and mask is None and unpacked and state is not None and isinstance(feature_map, str):
        # Fast path for one-token decoding, which validates its own shapes.
        found = forms.step(FORMS, LinearOperands(query, key, value, state, None, None, feature_map, eps), donate)
        if found is not None:
            return found if return_state else found[0]
    given = {"mask": mask, "segments": segments, "cu_seqlens": cu_seqlens, "state": state}
    sizes = check_operands(SHAPES, "query", query=query, key=key, value=value, **given)
    if (causal or not unpacked) and sizes["N"] != sizes["M"]:
        raise ValueError(f"causal or packed attention requires N = M, not {sizes['N']} queries and {sizes['M']} keys")
    if state is not None and not causal:
        raise ValueError("state= requires causal=True, since causal=False reads all keys in one call")
    phi = choose(feature_map, query.shape[-1])
    expected, wide = (0, 0, 0, 0), value.dtype  # of the state, if one is given or packed
    if state is not None or cu_seqlens is not None:
        size, wide = query.shape[-1], wide_dtype(query)
        features = size if isinstance(feature_map, str) else phi(upcast_half(query.new_zeros(1, size))).shape[-1]
        expected = (sizes["sequences"], key.shape[1], features, value.shape[-1] + 1)
        if state is not None:
            check_state(state, "(B, H, F, E+1)", expected, wide)
    query, (key, value) = zero_masked(mask if causal else None, query)[0], zero_masked(mask, key, value)

    def run(tokens: Sequence[Any], state: Any, carry: Any, part: Part | None) -> tuple[Tensor, Tensor]:
        q, k, v = tokens
        own = (mask, segments) if part is None else (part.cut(mask), None)
        given: LinearCall = {"causal": causal, "eps": eps, "mask": own[0], "segments": own[1], "state": state}
        given["donate"] = donate and unpacked
        if isinstance(feature_map, str):
            return named(q, k, v, feature_map=feature_map, **given)
        return attend(phi(upcast_half(q)), phi(upcast_half(k)), v, **given)

    if cu_seqlens is not None:
        # The first one is empty, for a call without sequences.
        outputs, states = [value[:, :, :0]], [key.new_zeros(0, *expected[1:], dtype=wide)]
        starts = key.new_zeros(expected, dtype=wide) if state is None else state
        for s, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            start = starts[s : s + 1]
            if begin == end:
                states.append(start)
                continue
            part = Part(0, begin, end, True, True)
            tokens = [part.cut(x, 2) for x in (query, key, value)]
            o, last = run(tokens, None if state is None else start, None, part)
            outputs.append(o)
            states.append(last)
        out, state = torch.cat(outputs, 2), torch.cat(states)
    elif segments is None:
        out, state = run((query, key, value), state, None, None)
    else:
        packed = Packed(run, segments, 2, total=not causal, causal=causal)
        out, state = isolated(packed, (query, key, value), state)
    assert state is not None
    return (out, state) if return_state else out


def named(q: Tensor, k: Tensor, v: Tensor, *, feature_map: str, **given: Unpack[LinearCall]) -> tuple[Tensor, Tensor]:
    """``linear_attention`` without checks, for a map in ``features.MAPS``, by the fastest form.

    Takes queries and keys before the map, and returns o (B,H,N,E) in v's dtype and the state (B,H,D,E+1).

    Raises:
        ValueError: a forced backend cannot serve the call.
    """
    sums, mask, segments = given.get("state"), given.get("mask"), given.get("segments")
    r = LinearOperands(q, k, v, sums, mask, segments, feature_map, given["eps"], given["causal"])
    return forms.serve(FORMS, r, given.get("donate", False))


def _by_features(r: LinearOperands, donate: bool = False) -> tuple[Tensor, Tensor]:
    """``attend`` on the features of queries and keys."""
    phi = MAPS[r.feature_map]
    given: LinearCall = {"causal": r.causal, "eps": r.eps, "mask": r.mask, "segments": r.segments}
    given["state"], given["donate"] = r.state, donate
    return attend(phi(upcast_half(r.q)), phi(upcast_half(r.k)), r.v, **given)


def _in_torch(r: LinearOperands) -> tuple[Tensor, Tensor]:
    if transformed():
        return composed.composed(r)
    return causally.attend(r) if r.causal else bidirectional.attend(r)


FORMS = Forms(
    {
        "triton": Form(triton.attend, triton.why_not, triton.step),
        "native": Form(native.attend, native.why_not, native.step),
        "torch": Form(_in_torch, step=_by_features),
        "reference": Form(_by_features),
    },
    exported=lambda r: _by_features(r) if r.causal else _in_torch(r),
    sharded="linear",
)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, numerator: tuple[Tensor, Tensor] | None = None, **given: Unpack[LinearCall]
) -> tuple[Tensor, Tensor]:
    """``linear_attention`` without checks, on features of queries and keys.

    Args:
        q: (B,H,N,F), in float32 or float64.
        k: (B,H,M,F), in float32 or float64.
        v: (B,H,M,E), in any dtype.
        numerator: Other features of queries and keys for the numerator, such as rotated ones. The denominator keeps
            the positive features q and k.
        given: As in ``linear_attention``.

    Returns:
        o (B,H,N,E) in v's dtype and the state (B,H,F,E+1).
    """
    causal, mask, segments = given["causal"], given.get("mask"), given.get("segments")
    q, k, v, state = materialize_neg(q, k, v, given.get("state"))
    # phi(0) = 1, so padding is removed after the feature map, not before.
    k, values = zero_masked(mask, k, with_ones(upcast_half(v)))
    with torch.autocast(q.device.type, enabled=False):
        if numerator is None:
            read, state = _sum(q, k, values, causal, segments, state, given.get("donate", False))
        else:
            parts = (None, None) if state is None else (state[..., :-1], state[..., -1:])
            turned = numerator[0], *zero_masked(mask, numerator[1])
            above, s = _sum(turned[0], turned[1], values[..., :-1], causal, segments, parts[0], False)
            below, z = _sum(q, k, values[..., -1:], causal, segments, parts[1], False)
            read, state = torch.cat([above, below], -1), torch.cat([s, z], -1)
        return normalize(read, given["eps"]).to(v.dtype), state


def _sum(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, segments: Tensor | None, state: Tensor | None, donate: bool
) -> tuple[Tensor, Tensor]:
    if causal:
        return recurrence.scan(q, k, v, state, segments=segments, donate=donate)
    return recurrence.total(q, k, v, segments)


def fold(
    k: Tensor, v: Tensor, inside: Tensor, *, mask: Tensor | None, state: Tensor | None, key: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the state and the mask that run ``named`` and ``attend`` in prefix mode; see ``prefix.fold``.

    Args:
        k: (B,H,N,F), features in float32 or float64.
        v: (B,H,N,E), in any dtype.
        inside: (B,N) bool, the tokens of the prefix.
        mask: (B,N) bool, True = a real token.
        state: (B,H,F,E+1), or None for zeros.
        key: Other features of the keys for the numerator, as in ``attend``.

    Returns:
        The state (B,H,F,E+1) and the mask (B,N).
    """
    values = with_ones(upcast_half(v))
    folded, rest = prefix.fold(k, values, inside, state, mask)
    if key is not None:
        folded = torch.cat([prefix.fold(key, values, inside, state)[0][..., :-1], folded[..., -1:]], -1)
    return folded, rest


def matrix(
    q: Tensor,
    k: Tensor,
    allowed: Tensor,
    *,
    eps: float,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    numerator: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the weights (B,H,N,M) of ``attend`` on the keys of a call; allowed bool (B,1,N,M). O(N M) memory."""
    below = ((q @ k.mT) * allowed).sum(-1, keepdim=True) + eps
    if state is not None:
        past = q @ state[..., -1:]
        below = below + (past if segments is None else past * (segments == segments[:, :1])[:, None, :, None])
    q, k = numerator or (q, k)
    return (q @ k.mT) * allowed / divisors(below)


def normalize(read: Tensor, eps: float) -> Tensor:
    """Divide by the last column plus eps: (..., E+1) -> (..., E); 0 where the divisor is 0."""
    return read[..., :-1] / divisors(read[..., -1:] + eps)
