"""The recurrence with decay and delta rule: P_t = Diag(alpha_t) S_{t-1}, S_t = P_t + beta_t k_t (v_t - P_t^T k_t)^T."""

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from .. import forms, onnx
from ..arguments import StateOptions
from ..custom_ops import exported
from ..forms import Form, Forms
from ..operands import check_scale
from . import chunks, definition, fla, native, triton
from .operands import (
    DecayOptions,
    DeltaOptions,
    Recurrence,
    RecurrenceOptions,
    call,
    scale_of,
    serve_with_keys,
    with_state,
)


@overload
def decay_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_state: Literal[False] = False, **options: Unpack[DecayOptions]
) -> Tensor: ...


@overload
def decay_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_state: Literal[True], **options: Unpack[DecayOptions]
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
    vectors = {"query": query, "key": key, "value": value, "log_decay": log_decay}
    rest: tuple[Any, ...] = (state, mask, segments, cu_seqlens, scale_of(query, scale), normalize is not None)
    out, state = call(FORMS, Recurrence(query, key, value, log_decay, None, *rest), vectors, donate, normalize)
    return (out, state) if return_state else out


@overload
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, return_state: Literal[False] = False, **options: Unpack[DeltaOptions]
) -> Tensor: ...


@overload
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, return_state: Literal[True], **options: Unpack[DeltaOptions]
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
    vectors = {"query": query, "key": key, "value": value, "beta": beta, "log_decay": log_decay}
    rest: tuple[Any, ...] = (state, mask, segments, cu_seqlens, scale_of(query, scale), normalize is not None)
    out, state = call(FORMS, Recurrence(query, key, value, log_decay, beta, *rest), vectors, donate, normalize)
    return (out, state) if return_state else out


def recur(
    q: Tensor, k: Tensor, v: Tensor, *, donate: bool = False, **options: Unpack[RecurrenceOptions]
) -> tuple[Tensor, Tensor]:
    """``decay_attention`` and ``delta_rule`` without checks, by the fastest form.

    Without ``log_decay`` the state does not decay. Without ``beta`` the outer product of key and value is added, as in
    linear attention. Returns o (B,H,N,E) in v's dtype and the state (B,H,D,E).

    Raises:
        ValueError: a forced backend cannot serve the call.
    """
    r = with_state(_operands(q, k, v, **options))
    return forms.serve(FORMS, r, donate) if q.shape[-1] else serve(r, donate)


def serve(r: Recurrence, donate: bool = False) -> tuple[Tensor, Tensor]:
    """Compute checked operands by the fastest form."""
    return serve_with_keys(FORMS, r, donate)


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    normalize: str | None = None,
    **options: Unpack[StateOptions],
) -> Recurrence:
    given: Any = {"state": None, **options}
    return Recurrence(q, k, v, log_decay, beta, **given, scale=scale_of(q, scale), normalize=normalize is not None)


FORMS = Forms(
    {
        # For decays per channel fla is first: it fuses the products inside chunks, longspan the scan over chunks.
        "fla": Form(fla.attend, fla.why_not),
        "triton": Form(triton.attend, triton.why_not, triton.step),
        "native": Form(native.attend, native.why_not, native.step),
        "torch": Form(chunks.attend, step=chunks.step),
        "reference": Form(definition.attend),
    },
    exported("recurrence", Recurrence, serve, inputs=6, like=2),
    onnx=onnx.linear_attention,
    sharded="recur",
    prefers_step=True,
)
