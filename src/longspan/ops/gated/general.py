"""The general delta rule: P_t = Diag(alpha_t) S_{t-1}, S_t = P_t + k_t v_t^T - e_t (P_t^T r_t)^T."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import check_mask, check_segments, check_state, describe
from ..backends import choose_backend, log_backend, resolve_backend
from ..exported import operation
from ..isolated import Packed, Part, isolated
from ..native import call
from ..onnx import check_fixed
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
from ..packed import by_sequence, check_packed
from ..tensors import per_root, upcast_half
from . import general_chunks as chunks
from . import general_native as kernels
from .decays import LOWEST

GENERAL = "the general delta rule"
SERVED = ("reference", "torch", "native")


@overload
def general_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    read_before_decay: bool = False,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[False] = False,
    donate: bool = False,
) -> Tensor: ...


@overload
def general_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    read_before_decay: bool = False,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[True],
    donate: bool = False,
) -> tuple[Tensor, Tensor]: ...


def general_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    read_before_decay: bool = False,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    donate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The delta rule with separate vectors for reading, erasing and writing.

    $$
    P_t = \mathrm{Diag}(e^{g_t}) S_{t-1}, \quad u_t = P_t^\top r_t, \quad S_t = P_t + k_t v_t^\top - e_t u_t^\top,
    \quad o_t = c \, S_t^\top q_t
    $$

    The transition of the state is $\mathrm{Diag}(e^{g_t}) - e_t r_t^\top \mathrm{Diag}(e^{g_t})$, diagonal plus rank
    one. ``delta_rule`` is the case $r = k$, $e = \beta k$ with values $\beta v$. No vector is normalized; the state
    stays bounded if $I - e_t r_t^\top$ has no singular value above 1. Transforms of ``torch.func`` and forward-mode
    derivatives use plain torch operations.

    Args:
        query: (B,G,N,D), of any strides, where G divides H: consecutive value heads share queries, keys, reads and
            erasures.
        key: (B,G,N,D).
        value: (B,H,N,E).
        read: $r_t$ (B,G,N,D), with which a token reads the state before it writes.
        erase: $e_t$ (B,G,N,D), where it subtracts what it has read.
        log_decay: $g_t \le 0$: (B,H,N), one per head, or (B,H,N,D), one per channel of the keys. -inf clears the
            state. None is no decay.
        scale: $c$; None is $1 / \sqrt D$.
        read_before_decay: True reads the state before its decay, $u_t = S_{t-1}^\top r_t$, as RWKV-7 does.
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
        >>> kk, a = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, 2, 5, 8)
        >>> log_decay = -0.6 * torch.rand(1, 2, 5, 8)
        >>> options = {"log_decay": log_decay, "scale": 1.0, "read_before_decay": True}
        >>> o = longspan.general_delta_rule(q, k, v, read=kk, erase=kk * a, **options)  # RWKV-7
        >>> o.shape
        torch.Size([1, 2, 5, 8])

    References:
        Diagonal plus rank one: Peng et al. 2025 (2503.14456). The form in chunks: Yang et al. 2024
        (2406.06484), section 3.
    """
    check_scale(scale)
    if donate and state is not None:
        check_donation(state, query=query, key=key, value=value, read=read, erase=erase, log_decay=log_decay)
    if mask is None and segments is None and cu_seqlens is None and state is not None:
        # Fast path for one-token decoding, which validates its own shapes.
        found = _token(query, key, value, read, erase, log_decay, scale, read_before_decay, state, donate)
        if found is not None:
            return found if return_state else found[0]
    _check(query, key, value, read, erase, log_decay, mask, segments, cu_seqlens, state)
    options: dict[str, Any] = {"scale": scale, "read_before_decay": read_before_decay, "cu_seqlens": cu_seqlens}

    def run(tokens: Sequence[Any], state: Any, carry: Any, part: Part | None) -> tuple[Tensor, Tensor]:
        q, k, v, read, erase, log_decay = tokens
        own = (mask, segments) if part is None else (part.cut(mask), None)
        given: dict[str, Any] = {"read": read, "erase": erase, "log_decay": log_decay, "mask": own[0]}
        given |= {"segments": own[1], "state": state, "donate": donate and segments is None}
        return recur(q, k, v, **given, **options)

    tokens = [query, key, value, read, erase, log_decay]
    if segments is None:
        out, after = run(tokens, state, None, None)
    else:
        # Masked tokens are not examined, and -inf is a valid log decay.
        tokens = zero_masked(mask, *tokens)
        gates = tokens[5]
        examined = [*tokens[:5], None if gates is None else gates.clamp(min=LOWEST)]
        out, after = isolated(Packed(run, segments, 2), tokens, state, examined=examined)
    return (out, after) if return_state else out


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    read_before_decay: bool = False,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """``general_delta_rule`` without checks, by the fastest form: o (B,H,N,E) in v's dtype and the state (B,H,D,E).

    Raises:
        ValueError: a forced backend cannot serve the call.
    """
    if state is None:
        sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        state = v.new_zeros(sequences, v.shape[1], q.shape[-1], v.shape[-1], dtype=upcast_half(v[:0]).dtype)
    early, factor = read_before_decay, per_root(q.shape[-1]) if scale is None else scale
    if in_onnx():
        check_fixed("the general delta rule", q.shape[2])
    elif torch.compiler.is_exporting():
        given = (q, k, v, read, erase, log_decay, state, mask, segments, cu_seqlens, factor, early)
        return recurrence(*given)
    if not q.shape[-1]:
        # D = 0 equals one channel of zeros, which every form can take.
        q, k, read, erase = (F.pad(t, (0, 1)) for t in (q, k, read, erase))
        log_decay = F.pad(log_decay, (0, 1)) if log_decay is not None and log_decay.dim() == 4 else log_decay
        more: dict[str, Any] = {"read": read, "erase": erase, "log_decay": log_decay, "scale": scale, "mask": mask}
        more |= {"read_before_decay": early, "segments": segments, "cu_seqlens": cu_seqlens}
        out, end = recur(q, k, v, **more, state=F.pad(state, (0, 0, 0, 1)))
        return out, end[:, :, :0]
    token = q.shape[2] == 1 and cu_seqlens is None
    if token and mask is None:
        found = _token(q, k, v, read, erase, log_decay, factor, early, state, donate)
        if found is not None:
            return found
    *tokens, state = operands = materialize_neg(q, k, v, read, erase, log_decay, state)
    assert state is not None
    packed: dict[str, Any] = {"cu_seqlens": cu_seqlens, "along": 2, "like": 2}
    options: dict[str, Any] = {"scale": factor, "mask": mask, "segments": segments, "early": early}
    native = call.why_not(q, k, v, state, read, erase, log_decay, mask, segments, cu_seqlens, family="general")
    if not native and not read.dtype == erase.dtype == v.dtype:
        native = "they take reads and erasures in the dtype of values"
    match choose_backend(GENERAL, SERVED, {"native": native}, prefer="torch" if token else ""):
        case "native":
            return kernels.attend(*operands, **options, cu_seqlens=cu_seqlens)
        case "reference":
            return by_sequence(reference, tokens, state, **options, **packed)
        case _ if q.shape[2] == 0 or v.numel() == 0:
            return torch.zeros_like(v), state.clone()
        case _ if token:
            # A single token belongs to the segment of the state.
            return step(*operands, **options, donate=donate and not transformed())
        case _:
            # ONNX has no operator for the triangular systems of the chunks.
            form = reference if in_onnx() else chunks.composed if transformed() else chunks.attend
            return by_sequence(form, tokens, state, **options, **packed)


def _again(*given: Any) -> tuple[Tensor, Tensor]:
    q, k, v, read, erase, log_decay, state, mask, segments, cu_seqlens, scale, early = given
    options: dict[str, Any] = {"read": read, "erase": erase, "log_decay": log_decay, "state": state, "mask": mask}
    options |= {"segments": segments, "cu_seqlens": cu_seqlens, "scale": scale, "read_before_decay": early}
    return recur(q, k, v, **options)


# The operation that exported programs contain.
recurrence = operation(
    "longspan::general_recurrence(Tensor q, Tensor k, Tensor v, Tensor read, Tensor erase, Tensor? log_decay, "
    "Tensor state, Tensor? mask, Tensor? segments, Tensor? cu_seqlens, float scale, bool early)",
    _again,
    inputs=7,
    like=2,
)


def _token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    scale: float | None,
    early: bool,
    state: Tensor,
    donate: bool,
) -> tuple[Tensor, Tensor] | None:
    """Return ``kernels.step`` if the backend is native, else None."""
    if resolve_backend(GENERAL, SERVED, "native") != "native":
        return None
    options: dict[str, Any] = {"log_decay": log_decay, "scale": scale, "early": early, "state": state}
    found = kernels.step(q, k, v, read=read, erase=erase, **options, donate=donate)
    if found is not None:
        log_backend(GENERAL, "native")
    return found


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    early: bool,
) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in float32 at least; arguments as in ``recur``; ``early``: read_before_decay."""
    if not k.shape[1]:
        return torch.zeros_like(v), state.clone()
    wide, groups = state.dtype, v.shape[1] // k.shape[1]
    q, k, v, read, erase, log_decay = zero_masked(mask, q, k, v, read, erase, log_decay)
    queries, keys, reads, erasures = (t.to(wide).repeat_interleave(groups, 1) for t in (q, k, read, erase))
    values, out, state = v.to(wide), [], state.clone()
    for t in range(q.shape[2]):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        after = state
        if log_decay is not None:
            alpha = log_decay[:, :, t].to(wide).clamp(min=LOWEST).exp()
            after = state * (alpha[..., None, None] if alpha.dim() == 2 else alpha[..., None])
        seen = reads[:, :, t, None, :] @ (state if early else after)  # (B,H,1,E)
        after = after + keys[:, :, t, :, None] * values[:, :, t, None, :] - erasures[:, :, t, :, None] * seen
        result = scale * queries[:, :, t, None, :] @ after
        if mask is not None:
            real = mask[:, t, None, None, None]
            after, result = torch.where(real, after, state), result.masked_fill(~real, 0.0)
        state = after
        out.append(result)
    return (torch.cat(out, 2).to(v.dtype) if out else torch.zeros_like(v)), state


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    scale: float,
    early: bool,
    donate: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence for N = 1, in few passes over the state, which ``donate=True`` overwrites."""
    wide, groups = state.dtype, v.shape[1] // k.shape[1]
    # A masked token neither decays nor writes, and reads 0.
    q, k, v, read, erase, log_decay = zero_masked(mask, q, k, v, read, erase, log_decay)
    queries, keys, reads, erasures = (t.to(wide).repeat_interleave(groups, 1) for t in (q, k, read, erase))
    early = early and log_decay is not None
    seen = reads @ state if early else None
    if log_decay is not None:
        alpha = log_decay.to(wide).clamp(min=LOWEST).exp()
        alpha = alpha.mT if log_decay.dim() == 4 else alpha[..., None]
        state = state.mul_(alpha) if donate else state * alpha
        donate = donate or not (torch.is_grad_enabled() or transformed())
    seen = reads @ state if seen is None else seen
    left, right = torch.cat([keys, -erasures], 2).mT, torch.cat([v.to(wide), seen], 2)  # (B,H,D,2), (B,H,2,E)
    state = state.add_(left @ right) if donate else state + left @ right
    return (queries * scale @ state).to(v.dtype), state


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of ``general_delta_rule`` fit each other."""
    vectors = {"query": query, "key": key, "value": value, "read": read, "erase": erase}
    for name, t in vectors.items():
        if t.dim() != 4 or not t.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor (B, H, N, D), not {describe(t)}")
    others = {"log_decay": log_decay, "mask": mask, "segments": segments, "state": state, "cu_seqlens": cu_seqlens}
    same_device(**vectors, **others)
    check_stored("the state", state)
    (batch, groups, n, size), (heads, width) = key.shape, value.shape[1::2]
    if query.shape != key.shape or (value.shape[0], value.shape[2]) != (batch, n) or heads % (groups or heads + 1):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit; "
            f"expected (B, G, N, D) twice and (B, H, N, E), where G divides H"
        )
    for name, t in (("read", read), ("erase", erase)):
        if t.shape != key.shape:
            raise ValueError(f"{name} must have the shape of key, {tuple(key.shape)}, not {tuple(t.shape)}")
    token = (batch, heads, n)
    if log_decay is not None and (
        tuple(log_decay.shape) not in (token, (*token, size)) or not log_decay.is_floating_point()
    ):
        expected = f"{token} or {(*token, size)}"
        raise ValueError(f"log_decay must be a floating-point tensor {expected}, not {describe(log_decay)}")
    if mask is not None:
        check_mask("mask", mask, (batch, n))
    if segments is not None:
        check_segments(segments, (batch, n))
    sequences = check_packed(cu_seqlens, batch, n, segments)
    if state is not None:
        check_state(state, "(B, H, D, E)", (sequences, heads, size, width), upcast_half(value[:0]).dtype)
