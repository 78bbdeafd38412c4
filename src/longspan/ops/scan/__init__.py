"""Recurrences whose states do not mix: the diagonal scan, and the selective scan of Mamba."""

from typing import Literal, Unpack, overload

from torch import Tensor

from ..arguments import CallOptions, StateOptions, check_operands
from ..custom_ops import exported
from ..forms import Form, Forms, serve, step
from ..onnx import unrolled
from ..operands import check_donation
from ..packed import count_states
from ..tensors import wide_dtype
from . import diagonal_forms, native, selective_forms
from .operands import Diagonal, Selective, SelectiveOptions, SelectiveWeights


@overload
def diagonal_scan(
    x: Tensor, log_decay: Tensor, *, return_state: Literal[False] = False, **options: Unpack[CallOptions]
) -> Tensor: ...


@overload
def diagonal_scan(
    x: Tensor, log_decay: Tensor, *, return_state: Literal[True], **options: Unpack[CallOptions]
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
    declined = False
    if mask is None and segments is None and cu_seqlens is None and state is not None:
        # Fast path for one-token decoding, which validates its own shapes.
        result = step(DIAGONAL, Diagonal(x, log_decay, state, None, None, None), donate)
        if result is not None:
            return result if return_state else result[0]
        declined = True
    given: StateOptions = {"mask": mask, "segments": segments, "cu_seqlens": cu_seqlens, "state": state}
    check_operands(DIAGONAL_SHAPES, "x", x=x, log_decay=log_decay, **given)
    r = Diagonal(x, log_decay, _first(x, given), mask, segments, cu_seqlens)
    y, state = serve(DIAGONAL, r, donate, declined)
    return (y, state) if return_state else y


def diagonal(
    x: Tensor, log_decay: Tensor, *, donate: bool = False, **options: Unpack[StateOptions]
) -> tuple[Tensor, Tensor]:
    """``diagonal_scan`` without checks, by the fastest form. Raises ValueError if a forced backend cannot serve it."""
    r = Diagonal(x, log_decay, _first(x, options), *_packing(options))
    return serve(DIAGONAL, r, donate)


@overload
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[SelectiveOptions],
) -> Tensor: ...


@overload
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    return_state: Literal[True],
    **options: Unpack[SelectiveOptions],
) -> tuple[Tensor, Tensor]: ...


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
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
        A: (channels,S), negative. None: $1 - \Delta_t B_t^2$ replaces $e^{\Delta_t A}$, as in Longhorn;
            it must not be negative.
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
        Without A: Liu et al. 2024 (2407.14207), section 3.
    """
    if donate and state is not None:
        check_donation(state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    declined = False
    if mask is None and segments is None and cu_seqlens is None and state is not None:
        # Fast path for one-token decoding, which validates its own shapes.
        r = Selective(x, dt, A, B, C, D, z, dt_bias, state, None, None, None, softplus)
        if (result := step(SELECTIVE, r, donate)) is not None:
            return result if return_state else result[0]
        declined = True
    given: StateOptions = {"mask": mask, "segments": segments, "cu_seqlens": cu_seqlens, "state": state}
    check_operands(SELECTIVE_SHAPES, "x", x=x, dt=dt, A=A, B=B, C=C, z=z, D=D, dt_bias=dt_bias, **given)
    first = _first(x, given, B.shape[2])
    r = Selective(x, dt, A, B, C, D, z, dt_bias, first, mask, segments, cu_seqlens, softplus)
    y, state = serve(SELECTIVE, r, donate, declined)
    return (y, state) if return_state else y


def selective(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    donate: bool = False,
    **options: Unpack[SelectiveWeights],
) -> tuple[Tensor, Tensor]:
    """``selective_scan`` without checks, by the fastest form. Raises ValueError if a forced backend cannot serve it."""
    weights = options.get("D"), options.get("z"), options.get("dt_bias")
    state, softplus = _first(x, options, B.shape[2]), options.get("softplus", False)
    r = Selective(x, dt, A, B, C, *weights, state, *_packing(options), softplus)
    return serve(SELECTIVE, r, donate)


DIAGONAL_SHAPES = {"x": "B N C", "log_decay": "B N C", "mask": "B N", "state": "B C"}
SELECTIVE_SHAPES = {
    "x": "B N channels",
    "dt": "B N channels",
    "A": "channels S",
    "B": "B N S",
    "C": "B N S",
    "D": "channels",
    "z": "B N channels",
    "dt_bias": "channels",
    "mask": "B N",
    "state": "B channels S",
}

DIAGONAL = Forms(
    {
        "native": Form(native.diagonal, native.why_not, native.diagonal_step),
        "torch": Form(diagonal_forms.attend),
        "reference": Form(diagonal_forms.reference),
    },
    exported("diagonal_scan", Diagonal, lambda r: serve(DIAGONAL, r), inputs=3, like=0),
    onnx=unrolled(diagonal_forms.attend),
)
SELECTIVE = Forms(
    {
        "native": Form(native.selective, native.why_not, native.selective_step),
        "torch": Form(selective_forms.attend),
        "reference": Form(selective_forms.reference),
    },
    exported("selective_scan", Selective, lambda r: serve(SELECTIVE, r), inputs=9, like=0),
    onnx=unrolled(selective_forms.attend),
)


def _packing(options: StateOptions) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return options.get("mask"), options.get("segments"), options.get("cu_seqlens")


def _first(x: Tensor, options: StateOptions, *size: int) -> Tensor:
    """The state before the first token: the given one, or zeros."""
    state = options.get("state")
    if state is not None:
        return state
    return x.new_zeros(count_states(x, options.get("cu_seqlens")), x.shape[2], *size, dtype=wide_dtype(x))
