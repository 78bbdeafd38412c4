"""The recurrence with decay and delta rule: P_t = Diag(alpha_t) S_{t-1}, S_t = P_t + beta_t k_t (v_t - P_t^T k_t)^T."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._utils.spec import known
from .. import onnx
from ..arguments import check_mask, check_segments, check_state, describe
from ..backends import choose_backend, log_backend, resolve_backend
from ..exported import operation
from ..isolated import Packed, Part, isolated
from ..native import call
from ..operands import (
    check_donation,
    check_scale,
    check_stored,
    in_onnx,
    materialize_neg,
    same_device,
    transformed,
    zero_masked,
)
from ..packed import check_packed
from ..shards import active_shards
from ..tensors import per_root, upcast_half
from . import chunks, fla, triton
from . import native as kernels
from .decays import LOWEST
from .prepared import NORMS, prepared

SUM, DECAY, DELTA = "a running sum of outer products", "decay attention", "the delta rule"
SERVED = ("reference", "torch", "native", "triton", "fla")


@overload
def decay_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor,
    scale: float | None = None,
    normalize: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[False] = False,
    donate: bool = False,
) -> Tensor: ...


@overload
def decay_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor,
    scale: float | None = None,
    normalize: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[True],
    donate: bool = False,
) -> tuple[Tensor, Tensor]: ...


def decay_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor,
    scale: float | None = None,
    normalize: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    donate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Causal linear attention with decay, without a normalizer.

    $$
    S_t = \mathrm{Diag}(e^{g_t}) S_{t-1} + k_t v_t^\top, \quad o_t = c \, S_t^\top q_t
    $$

    Operands of any strides, such as transposed (B,N,H,D), are read without a copy. Transforms of ``torch.func`` and
    forward-mode derivatives use plain torch operations.

    Args:
        query: (B,G,N,D), of any strides, where G divides H: consecutive value heads share a query and a key.
        key: (B,G,N,D).
        value: (B,H,N,E).
        log_decay: $g_t \le 0$: (B,H,N), one per head, or (B,H,N,D), one per channel of the keys. -inf clears the
            state.
        scale: $c$; None is $1 / \sqrt D$.
        normalize: ``"l2"`` divides queries and keys by $\sqrt{\lVert k \rVert^2 + 10^{-6}}$, in float32 at least.
        mask: (B,N) bool, True = a real token. A masked token writes nothing, decays nothing, and its output is 0.
        segments: (B,N) int64, packed sequences. Equal ids are adjacent. The state starts from zero at each border; a
            given state belongs to the first segment, the returned one to the last.
        cu_seqlens: (S+1,) int32 or int64, offsets of S sequences that are packed into one row, B = 1: sequence s is
            tokens cu_seqlens[s] ... cu_seqlens[s+1], and has a separate state.
        state: (B,H,D,E), or (S,H,D,E) with cu_seqlens, from an earlier call. None starts from zeros.
        return_state: Also returns the state after the last token.
        donate: Allows the call to overwrite ``state``.

    Returns:
        The output (B,H,N,E) in value's dtype. With ``return_state=True`` also the state in float32 or float64, of the
        shape of ``state``.

    Raises:
        ValueError: shapes, dtypes or devices do not match, segments and cu_seqlens are both given, or a donated state
            shares memory with another operand or itself.

    Example:
        >>> import torch, longspan
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)  # (B,H,N,D) each
        >>> log_decay = torch.full((1, 2, 5), -0.1)
        >>> o, state = longspan.decay_attention(q, k, v, log_decay=log_decay, return_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 8, 8]))

    References:
        Per channel: Yang et al. 2023 (2312.06635), eq. 3. Per head: Sun et al. 2023 (2307.08621), eq. 6, and Dao and
        Gu 2024 (2405.21060), eq. 16.
    """
    check_scale(scale)
    if donate and state is not None:
        check_donation(state, query=query, key=key, value=value, log_decay=log_decay)
    if mask is None and segments is None and cu_seqlens is None and state is not None:
        # Fast path for one-token decoding, which validates its own shapes.
        found = _token(query, key, value, log_decay, None, scale, normalize, state, donate)
        if found is not None:
            return found if return_state else found[0]
    check(query, key, value, log_decay, None, normalize, mask, segments, cu_seqlens, state)
    options: dict[str, Any] = {
        "scale": scale,
        "normalize": normalize,
        "mask": mask,
        "segments": segments,
        "cu_seqlens": cu_seqlens,
    }
    out, state = _checked(query, key, value, log_decay, None, state, donate=donate, **options)
    return (out, state) if return_state else out


@overload
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    normalize: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[False] = False,
    donate: bool = False,
) -> Tensor: ...


@overload
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    normalize: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[True],
    donate: bool = False,
) -> tuple[Tensor, Tensor]: ...


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    normalize: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    donate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The delta rule, with or without decay: the state learns to return $v_t$ for $k_t$.

    $$
    P_t = \mathrm{Diag}(e^{g_t}) S_{t-1}, \quad S_t = P_t + \beta_t k_t (v_t - P_t^\top k_t)^\top,
    \quad o_t = c \, S_t^\top q_t
    $$

    The state decays first, then the error is read. Keys are not normalized by default; the state stays bounded if
    $\beta_t \lVert k_t \rVert^2 \le 2$. Transforms of ``torch.func`` and forward-mode derivatives use plain torch
    operations.

    Args:
        query: (B,G,N,D), of any strides, where G divides H: consecutive value heads share a query and a key.
        key: (B,G,N,D).
        value: (B,H,N,E).
        beta: (B,H,N), the step size $\beta_t$: 0 writes nothing, 1 replaces the value stored for a key of norm 1.
        log_decay: $g_t \le 0$: (B,H,N), one per head, or (B,H,N,D), one per channel of the keys. -inf clears the
            state. None is no decay.
        scale: $c$; None is $1 / \sqrt D$.
        normalize: ``"l2"`` divides queries and keys by $\sqrt{\lVert k \rVert^2 + 10^{-6}}$, in float32 at least.
        mask: (B,N) bool, True = a real token. A masked token writes nothing, decays nothing, and its output is 0.
        segments: (B,N) int64, packed sequences. Equal ids are adjacent. The state starts from zero at each border; a
            given state belongs to the first segment, the returned one to the last.
        cu_seqlens: (S+1,) int32 or int64, offsets of S sequences that are packed into one row, B = 1: sequence s is
            tokens cu_seqlens[s] ... cu_seqlens[s+1], and has a separate state.
        state: (B,H,D,E), or (S,H,D,E) with cu_seqlens, from an earlier call. None starts from zeros.
        return_state: Also returns the state after the last token.
        donate: Allows the call to overwrite ``state``.

    Returns:
        The output (B,H,N,E) in value's dtype. With ``return_state=True`` also the state in float32 or float64, of the
        shape of ``state``.

    Raises:
        ValueError: shapes, dtypes or devices do not match, segments and cu_seqlens are both given, or a donated state
            shares memory with another operand or itself.

    Example:
        >>> import torch, longspan
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)  # (B,H,N,D) each
        >>> k, beta = torch.nn.functional.normalize(k, dim=-1), torch.ones(1, 2, 5)
        >>> _, state = longspan.delta_rule(q, k, v, beta=beta, return_state=True)
        >>> stored = state.mT @ k[:, :, -1, :, None]  # the value stored for the last key is the last value
        >>> torch.allclose(stored[..., 0], v[:, :, -1], atol=1e-5)
        True

    References:
        Schlag et al. 2021 (2102.11174), eq. 24; Yang et al. 2024 (2406.06484), eq. 5. With a decay per head: Yang et
        al. 2024 (2412.06464), eq. 10. With a decay per channel: Kimi Team 2025 (2510.26692), eq. 1.
    """
    check_scale(scale)
    if donate and state is not None:
        check_donation(state, query=query, key=key, value=value, beta=beta, log_decay=log_decay)
    if mask is None and segments is None and cu_seqlens is None and state is not None:
        # Fast path for one-token decoding, which validates its own shapes.
        found = _token(query, key, value, log_decay, beta, scale, normalize, state, donate)
        if found is not None:
            return found if return_state else found[0]
    check(query, key, value, log_decay, beta, normalize, mask, segments, cu_seqlens, state)
    options: dict[str, Any] = {
        "scale": scale,
        "normalize": normalize,
        "mask": mask,
        "segments": segments,
        "cu_seqlens": cu_seqlens,
    }
    out, state = _checked(query, key, value, log_decay, beta, state, donate=donate, **options)
    return (out, state) if return_state else out


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    donate: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``recur`` with NaN and infinity confined to the packed sequence that holds them."""

    def run(tokens: Sequence[Any], state: Any, carry: Any, part: Part | None) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, beta = tokens
        own = (mask, segments) if part is None else (part.cut(mask), None)
        return recur(
            q,
            k,
            v,
            log_decay=log_decay,
            beta=beta,
            state=state,
            mask=own[0],
            segments=own[1],
            donate=donate and segments is None,
            **options,
        )

    if segments is None:
        return run((query, key, value, log_decay, beta), state, None, None)
    # Masked tokens are not examined, and -inf is a valid log decay.
    tokens = zero_masked(mask, query, key, value, log_decay, beta)
    examined = [t if t is None or i != 3 else t.clamp(min=LOWEST) for i, t in enumerate(tokens)]
    out, after = isolated(Packed(run, segments, 2), tokens, state, examined=examined)
    return out, after


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    normalize: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """``decay_attention`` and ``delta_rule`` without checks, by the fastest form.

    Args:
        q: (B,G,N,D).
        k: (B,G,N,D).
        v: (B,H,N,E).
        log_decay: (B,H,N) or (B,H,N,D); None is no decay.
        beta: (B,H,N); None is no delta rule.
        scale: As in ``decay_attention``, like the arguments below.
        normalize: ``"l2"`` or None.
        mask: (B,N) bool.
        segments: (B,N) int64.
        cu_seqlens: (S+1,) int32 or int64.
        state: (B,H,D,E), or None for zeros.
        donate: Allows the call to overwrite ``state``.

    Returns:
        o (B,H,N,E) in v's dtype and the state (B,H,D,E).

    Raises:
        ValueError: a forced backend cannot serve the call.
    """
    if (shards := active_shards()) is not None:
        options: dict[str, Any] = {"log_decay": log_decay, "beta": beta, "scale": scale, "normalize": normalize}
        options |= {"mask": mask, "segments": segments, "cu_seqlens": cu_seqlens, "state": state}
        return shards.recur(recur, q, k, v, **options)
    if state is None:
        sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        state = v.new_zeros(sequences, v.shape[1], q.shape[-1], v.shape[-1], dtype=upcast_half(v[:0]).dtype)
    if torch.compiler.is_exporting():
        factor = per_root(q.shape[-1]) if scale is None else scale
        write = onnx.linear_attention if in_onnx() else recurrence
        return write(q, k, v, log_decay, beta, state, mask, segments, cu_seqlens, factor, normalize is not None)
    if not q.shape[-1]:
        # D = 0 equals one channel of zeros, which every form can take.
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))
        log_decay = F.pad(log_decay, (0, 1)) if log_decay is not None and log_decay.dim() == 4 else log_decay
        options = {
            "log_decay": log_decay,
            "beta": beta,
            "scale": scale,
            "normalize": normalize,
            "mask": mask,
        }
        options |= {"segments": segments, "cu_seqlens": cu_seqlens, "state": F.pad(state, (0, 0, 0, 1))}
        out, end = recur(q, k, v, **options)
        return out, end[:, :, :0]
    if mask is None and cu_seqlens is None and q.shape[2] == 1:
        found = _token(q, k, v, log_decay, beta, scale, normalize, state, donate)
        if found is not None:
            return found
    q, k, v, state, log_decay, beta = materialize_neg(q, k, v, state, log_decay, beta)
    assert state is not None
    op, factor = _op(log_decay, beta), per_root(q.shape[-1]) if scale is None else scale
    options = {"log_decay": log_decay, "beta": beta, "state": state, "scale": factor, "mask": mask}
    options |= {"segments": segments, "normalize": normalize is not None, "cu_seqlens": cu_seqlens}
    token = q.shape[2] == 1 and cu_seqlens is None
    # For decays per channel fla is first: its kernels fuse the products inside chunks, longspan's the scan over chunks.
    why_not = {
        "fla": fla.why_not(q, k, v, state, log_decay, beta, mask, segments, cu_seqlens, needed=not token),
        "triton": triton.why_not(q, k, v, state, log_decay, beta, mask, segments, cu_seqlens),
        "native": call.why_not(q, k, v, state, log_decay, beta, mask, segments, cu_seqlens, family="gated"),
    }
    match choose_backend(op, SERVED, why_not, prefer="torch" if token else ""):
        case "triton":
            return triton.attend(q, k, v, **options)
        case "fla":
            return fla.attend(q, k, v, **options)
        case "native":
            return kernels.attend(q, k, v, **options)
        case "reference":
            return prepared(reference, q, k, v, **options)
        case _ if q.shape[2] == 0 or v.numel() == 0:
            return torch.zeros_like(v), state.clone()
        case _ if token:
            # A single token belongs to the segment of the state.
            form = partial(step, donate=donate and not transformed())
            return prepared(form, q, k, v, **options)
        case _ if transformed():
            return prepared(chunks.composed, q, k, v, **options)
        case _:
            return prepared(chunks.attend, q, k, v, **options)


def _again(*given: Any) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, beta, state, mask, segments, cu_seqlens, scale, normalize = given
    options: dict[str, Any] = {"log_decay": log_decay, "beta": beta, "scale": scale, "state": state, "mask": mask}
    options |= {"segments": segments, "cu_seqlens": cu_seqlens, "normalize": "l2" if normalize else None}
    return recur(q, k, v, **options)


# The operation that exported programs contain.
recurrence = operation(
    "longspan::recurrence(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta, Tensor state, "
    "Tensor? mask, Tensor? segments, Tensor? cu_seqlens, float scale, bool normalize)",
    _again,
    inputs=6,
    like=2,
)


def _token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: str | None,
    state: Tensor,
    donate: bool,
) -> tuple[Tensor, Tensor] | None:
    """Return the step of the kernels for the device if they serve the call, else None."""
    op = _op(log_decay, beta)
    name = resolve_backend(op, SERVED, "triton" if v.is_cuda else "native")
    if name not in ("native", "triton") or normalize not in (None, "l2"):
        return None
    options: dict[str, Any] = {"log_decay": log_decay, "beta": beta, "scale": scale, "state": state, "donate": donate}
    form = triton.step if name == "triton" else kernels.step
    found = form(q, k, v, normalize=normalize is not None, **options)
    if found is not None:
        log_backend(op, name)
    return found


def _op(log_decay: Tensor | None, beta: Tensor | None) -> str:
    return DELTA if beta is not None else SUM if log_decay is None else DECAY


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in float32 at least; arguments as in ``recur``."""
    if not k.shape[1]:
        return torch.zeros_like(v), state.clone()
    wide, groups = state.dtype, v.shape[1] // k.shape[1]
    q, k, v, log_decay, beta = zero_masked(mask, q, k, v, log_decay, beta)
    queries, keys = (t.to(wide).repeat_interleave(groups, 1) for t in (q, k))
    values, out, state = v.to(wide), [], state.clone()
    for t in range(q.shape[2]):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        after = state
        if log_decay is not None:
            alpha = log_decay[:, :, t].to(wide).clamp(min=LOWEST).exp()
            after = state * (alpha[..., None, None] if alpha.dim() == 2 else alpha[..., None])
        key, new = keys[:, :, t, :, None], values[:, :, t, None, :]  # (B,H,D,1), (B,H,1,E)
        if beta is not None:
            new = beta[:, :, t, None, None].to(wide) * (new - key.mT @ after)
        after = after + key * new
        read = scale * queries[:, :, t, None, :] @ after
        if mask is not None:
            real = mask[:, t, None, None, None]
            after, read = torch.where(real, after, state), read.masked_fill(~real, 0.0)
        state = after
        out.append(read)
    return (torch.cat(out, 2).to(v.dtype) if out else torch.zeros_like(v)), state


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    segments: Tensor | None,
    donate: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence for N = 1, in few passes over the state, which ``donate=True`` overwrites."""
    wide, groups = state.dtype, v.shape[1] // k.shape[1]
    # A masked token neither decays nor writes, and reads 0.
    q, k, v, log_decay, beta = zero_masked(mask, q, k, v, log_decay, beta)
    queries, keys, new = q.to(wide) * scale, k.to(wide), v.to(wide)
    if groups > 1:
        queries, keys = queries.repeat_interleave(groups, 1), keys.repeat_interleave(groups, 1)
    if log_decay is not None:
        alpha = log_decay.to(wide).clamp(min=LOWEST).exp()
        alpha = alpha.mT if log_decay.dim() == 4 else alpha[..., None]
        state = state.mul_(alpha) if donate else state * alpha
        donate = donate or not (torch.is_grad_enabled() or transformed())
    if beta is not None:
        new = beta[..., None].to(wide) * (new - keys @ state)
    state = state.addcmul_(keys.mT, new) if donate else torch.addcmul(state, keys.mT, new)
    return (queries @ state).to(v.dtype), state


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    normalize: str | None,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of ``decay_attention`` or ``delta_rule`` fit each other."""
    if normalize is not None:
        known(normalize, NORMS, "norm of queries and keys")
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() != 4 or not t.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor (B, H, N, D), not {describe(t)}")
    others = {"log_decay": log_decay, "beta": beta, "mask": mask, "segments": segments, "state": state}
    others["cu_seqlens"] = cu_seqlens
    same_device(query=query, key=key, value=value, **others)
    check_stored("the state", state)
    (batch, groups, n, size), (heads, width) = key.shape, value.shape[1::2]
    if query.shape != key.shape or (value.shape[0], value.shape[2]) != (batch, n) or heads % (groups or heads + 1):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit; "
            f"expected (B, G, N, D) twice and (B, H, N, E), where G divides H"
        )
    token = (batch, heads, n)
    if log_decay is not None and (
        tuple(log_decay.shape) not in (token, (*token, size)) or not log_decay.is_floating_point()
    ):
        expected = f"{token} or {(*token, size)}"
        raise ValueError(f"log_decay must be a floating-point tensor {expected}, not {describe(log_decay)}")
    if beta is not None and (tuple(beta.shape) != token or not beta.is_floating_point()):
        raise ValueError(f"beta must be a floating-point tensor {token}, not {describe(beta)}")
    if mask is not None:
        check_mask("mask", mask, (batch, n))
    if segments is not None:
        check_segments(segments, (batch, n))
    sequences = check_packed(cu_seqlens, batch, n, segments)
    if state is not None:
        check_state(state, "(B, H, D, E)", (sequences, heads, size, width), upcast_half(value[:0]).dtype)
