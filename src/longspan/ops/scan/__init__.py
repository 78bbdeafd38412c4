"""Recurrences whose states do not mix: the diagonal scan, and the selective scan of Mamba."""

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import Tensor

from ..arguments import check_mask, check_segments, check_state, describe
from ..custom_ops import exported
from ..forms import Form, Forms, serve
from ..onnx import check_fixed
from ..operands import check_donation, check_stored, same_device
from ..packed import check_packed
from ..tensors import upcast_half
from . import diagonal_forms, native, selective_forms
from .operands import Diagonal, Selective


@overload
def diagonal_scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[False] = False,
    donate: bool = False,
) -> Tensor: ...


@overload
def diagonal_scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[True],
    donate: bool = False,
) -> tuple[Tensor, Tensor]: ...


def diagonal_scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    donate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The diagonal recurrence, channel by channel.

    $$
    h_t = e^{g_t} h_{t-1} + x_t
    $$

    Sums are float32 at least. Operands of any strides are read without a copy, such as ``x.mT`` of a tensor (B,C,N).
    Transforms of ``torch.func`` and forward-mode derivatives use plain torch operations.

    Args:
        x: (B,N,C), here with C channels.
        log_decay: $g_t \le 0$, (B,N,C). -inf clears the state: infinity and NaN in it do not survive.
        mask: (B,N) bool, True = a real token. A masked token adds nothing, decays nothing, and its output is 0.
        segments: (B,N) int64, packed sequences. Equal ids are adjacent. The state starts from zero at each border; a
            given state belongs to the first segment, the returned one to the last.
        cu_seqlens: (S+1,) int32 or int64, offsets of S sequences that are packed into one row, B = 1: sequence s is
            tokens cu_seqlens[s] ... cu_seqlens[s+1], and has a separate state.
        state: (B,C), or (S,C) with cu_seqlens, from an earlier call, in float32 at least. None starts from zeros.
        return_state: Also returns the state after the last token.
        donate: Allows the call to overwrite ``state``.

    Returns:
        All states (B,N,C) in x's dtype. With ``return_state=True`` also the last one in float32 or float64, of the
        shape of ``state``.

    Raises:
        ValueError: shapes, dtypes or devices do not match, segments and cu_seqlens are both given, or a donated state
            shares memory with another operand or itself.

    Example:
        >>> import torch, longspan
        >>> x, log_decay = torch.ones(1, 3, 2), torch.tensor([0.5, 0.25]).log().expand(1, 3, 2)
        >>> longspan.diagonal_scan(x, log_decay)
        tensor([[[1.0000, 1.0000],
                 [1.5000, 1.2500],
                 [1.7500, 1.3125]]])

    References:
        De et al. 2024 (2402.19427), eq. 4; Qin et al. 2023 (2311.04823), section 3.
    """
    if donate and state is not None:
        check_donation(state, x=x, log_decay=log_decay)
    _check_tokens("C", {"x": x, "log_decay": log_decay}, mask, segments, cu_seqlens, state)
    sequences = check_packed(cu_seqlens, x.shape[0], x.shape[1], segments)
    if state is not None:
        check_state(state, "(B, C)", (sequences, x.shape[2]), upcast_half(x[:0]).dtype)
    y, state = diagonal(x, log_decay, mask=mask, segments=segments, cu_seqlens=cu_seqlens, state=state, donate=donate)
    return (y, state) if return_state else y


def diagonal(
    x: Tensor,
    log_decay: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """``diagonal_scan`` without checks, by the fastest form. Raises ValueError if a forced backend cannot serve it."""
    state = _zeros(x, cu_seqlens) if state is None else state
    return serve(DIAGONAL, Diagonal(x, log_decay, state, mask, segments, cu_seqlens), donate)


@overload
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[False] = False,
    donate: bool = False,
) -> Tensor: ...


@overload
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: Literal[True],
    donate: bool = False,
) -> tuple[Tensor, Tensor]: ...


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    donate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The selective scan of Mamba: S states per channel, with decays and inputs that depend on the token.

    $$
    h_t = e^{\Delta_t A} h_{t-1} + \Delta_t x_t B_t, \quad y_t = (C_t \cdot h_t + D x_t) \, \mathrm{silu}(z_t)
    $$

    The step size $\Delta_t$ is ``dt``, or softplus(dt + dt_bias). B and C are shared by all channels. Sums are float32
    at least. Operands of any strides are read without a copy. Transforms of ``torch.func`` and forward-mode
    derivatives use plain torch operations.

    Args:
        x: (B,N,channels).
        dt: (B,N,channels), step sizes, or what softplus makes them of.
        A: (channels,S), negative.
        B: (B,N,S), how the token writes to the states.
        C: (B,N,S), how the token reads the states.
        D: (channels,), or None for 0.
        z: (B,N,channels), the gate, or None for no gate.
        dt_bias: (channels,), added to dt, or None.
        softplus: Step sizes are softplus of dt, in float32 at least.
        mask: (B,N) bool, True = a real token. A masked token writes nothing, decays nothing, and its output is 0.
        segments: (B,N) int64, packed sequences. Equal ids are adjacent. The state starts from zero at each border; a
            given state belongs to the first segment, the returned one to the last.
        cu_seqlens: offsets of packed sequences, (sequences + 1,) int32 or int64, B = 1: sequence s is tokens
            cu_seqlens[s] ... cu_seqlens[s+1], and has a separate state.
        state: (B,channels,S), or (sequences,channels,S) with cu_seqlens, from an earlier call, in float32 at least.
            None starts from zeros.
        return_state: Also returns the state after the last token.
        donate: Allows the call to overwrite ``state``.

    Returns:
        The output (B,N,channels) in x's dtype. With ``return_state=True`` also the state in float32 or float64, of the
        shape of ``state``.

    Raises:
        ValueError: shapes, dtypes or devices do not match, segments and cu_seqlens are both given, or a donated state
            shares memory with another operand or itself.

    Example:
        >>> import torch, longspan
        >>> x, dt, B, C = torch.randn(1, 5, 8), torch.rand(1, 5, 8), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
        >>> A = -torch.arange(1.0, 5.0).expand(8, 4)
        >>> y, state = longspan.selective_scan(x, dt, A, B, C, D=torch.ones(8), return_state=True)
        >>> y.shape, state.shape
        (torch.Size([1, 5, 8]), torch.Size([1, 8, 4]))

    References:
        Gu and Dao 2023 (2312.00752), eq. 2 and section 3, with the step of the authors' code for B, $\Delta_t B_t$.
    """
    if donate and state is not None:
        check_donation(state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    check(x, dt, A, B, C, D, z, dt_bias, mask, segments, cu_seqlens, state)
    options: dict[str, Any] = {"mask": mask, "segments": segments, "cu_seqlens": cu_seqlens, "donate": donate}
    y, state = selective(x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, softplus=softplus, state=state, **options)
    return (y, state) if return_state else y


def selective(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """``selective_scan`` without checks, by the fastest form. Raises ValueError if a forced backend cannot serve it."""
    state = _zeros(x, cu_seqlens, A.shape[1]) if state is None else state
    return serve(
        SELECTIVE, Selective(x, dt, A, B, C, D, z, dt_bias, state, mask, segments, cu_seqlens, softplus), donate
    )


DIAGONAL = Forms(
    {
        "native": Form(native.diagonal, native.why_not, native.diagonal_step),
        "torch": Form(diagonal_forms.attend),
        "reference": Form(diagonal_forms.reference),
    },
    exported("diagonal_scan", Diagonal, lambda r: serve(DIAGONAL, r), inputs=3, like=0),
    onnx=lambda r: _unrolled(diagonal_forms.attend, r),
)
SELECTIVE = Forms(
    {
        "native": Form(native.selective, native.why_not, native.selective_step),
        "torch": Form(selective_forms.attend),
        "reference": Form(selective_forms.reference),
    },
    exported("selective_scan", Selective, lambda r: serve(SELECTIVE, r), inputs=9, like=0),
    onnx=lambda r: _unrolled(selective_forms.attend, r),
)


def _unrolled(form: Callable[[Any], tuple[Tensor, Tensor]], r: Diagonal | Selective) -> tuple[Tensor, Tensor]:
    check_fixed(r.op, r.x.shape[1])
    return form(r)


def _zeros(x: Tensor, cu_seqlens: Tensor | None, *size: int) -> Tensor:
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return x.new_zeros(sequences, x.shape[2], *size, dtype=upcast_half(x[:0]).dtype)


def check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of ``selective_scan`` fit each other."""
    _check_tokens("channels", {"x": x, "dt": dt, "z": z}, mask, segments, cu_seqlens, state)
    same_device(x=x, A=A, B=B, C=C, D=D, dt_bias=dt_bias)
    batch, n, channels = x.shape
    if A.dim() != 2 or len(A) != channels or not A.is_floating_point():
        raise ValueError(f"A must be a floating-point tensor (channels, S) = ({channels}, S), not {describe(A)}")
    size = A.shape[1]
    for name, t, shape in (
        ("B", B, (batch, n, size)),
        ("C", C, (batch, n, size)),
        ("D", D, (channels,)),
        ("dt_bias", dt_bias, (channels,)),
    ):
        if t is not None and (tuple(t.shape) != shape or not t.is_floating_point()):
            raise ValueError(f"{name} must be a floating-point tensor {shape}, not {describe(t)}")
    sequences = check_packed(cu_seqlens, batch, n, segments)
    if state is not None:
        check_state(state, "(B, channels, S)", (sequences, channels, size), upcast_half(x[:0]).dtype)


def _check_tokens(
    last: str,
    tokens: dict[str, Tensor | None],
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    """Raise ValueError unless all ``tokens`` are (B,N,C), and the mask and segments (B,N)."""
    same_device(**tokens, mask=mask, segments=segments, cu_seqlens=cu_seqlens, state=state)
    check_stored("the state", state)
    shape: tuple[int, ...] = ()
    for name, t in tokens.items():
        if t is None:
            continue
        if t.dim() != 3 or not t.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor (B, N, {last}), not {describe(t)}")
        shape = shape or tuple(t.shape)
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} must be (B, N, {last}) = {shape}, as x is, not {describe(t)}")
    if mask is not None:
        check_mask("mask", mask, shape[:2])
    if segments is not None:
        check_segments(segments, shape[:2])
