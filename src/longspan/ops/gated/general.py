"""The general delta rule: P_t = Diag(alpha_t) S_{t-1}, S_t = P_t + k_t v_t^T - e_t (P_t^T r_t)^T."""

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from .. import forms
from ..arguments import StateOptions
from ..custom_ops import exported
from ..forms import Form, Forms
from ..onnx import unrolled
from ..operands import check_scale
from . import general_chunks, general_definition, general_native
from .operands import (
    GeneralOptions,
    GeneralRecurrence,
    GeneralRecurrenceOptions,
    call,
    scale_of,
    serve_with_keys,
    with_state,
)


@overload
def general_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[GeneralOptions],
) -> Tensor: ...


@overload
def general_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, return_state: Literal[True], **options: Unpack[GeneralOptions]
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
    vectors = {"query": query, "key": key, "value": value, "read": read, "erase": erase, "log_decay": log_decay}
    rest: tuple[Any, ...] = (state, mask, segments, cu_seqlens, scale_of(query, scale), read_before_decay)
    out, after = call(FORMS, GeneralRecurrence(query, key, value, read, erase, log_decay, *rest), vectors, donate)
    return (out, after) if return_state else out


def recur(
    q: Tensor, k: Tensor, v: Tensor, *, donate: bool = False, **options: Unpack[GeneralRecurrenceOptions]
) -> tuple[Tensor, Tensor]:
    """``general_delta_rule`` without checks, by the fastest form: o (B,H,N,E) in v's dtype and the state (B,H,D,E).

    Raises:
        ValueError: a forced backend cannot serve the call.
    """
    r = with_state(_operands(q, k, v, **options))
    return forms.serve(FORMS, r, donate) if q.shape[-1] else serve(r, donate)


def serve(r: GeneralRecurrence, donate: bool = False) -> tuple[Tensor, Tensor]:
    """Compute checked operands by the fastest form."""
    return serve_with_keys(FORMS, r, donate)


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    erase: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    read_before_decay: bool = False,
    **options: Unpack[StateOptions],
) -> GeneralRecurrence:
    given: Any = {"state": None, **options}
    scale = scale_of(q, scale)
    return GeneralRecurrence(q, k, v, read, erase, log_decay, **given, scale=scale, early=read_before_decay)


FORMS = Forms(
    {
        "native": Form(general_native.attend, general_native.why_not, general_native.step),
        "torch": Form(general_chunks.attend, step=general_chunks.step),
        "reference": Form(general_definition.attend),
    },
    exported("general_recurrence", GeneralRecurrence, serve, inputs=7, like=2),
    # ONNX has no operator for the triangular systems of the chunks.
    onnx=unrolled(general_definition.attend),
    prefers_step=True,
)
