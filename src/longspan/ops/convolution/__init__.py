"""The causal depth-wise convolution over the last K tokens of each channel, with a state for streams."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..._utils.spec import known
from .. import forms
from ..arguments import StateOptions, check_operands, describe
from ..forms import Form, Forms
from ..operands import check_donation, same_device
from ..packed import by_sequence, count_states
from ..rows import gather_valid, last_valid, scatter_back
from ..tensors import wide_dtype
from . import composed, native, triton
from .operands import Convolution

ACTIVATIONS = {"silu": "x sigmoid(x)"}


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Causal depth-wise convolution over the last K tokens, with a state between calls.

    $$
    y_{tc} = \mathrm{act}\left(b_c + \sum_{j=1}^{K} w_{cj} \, x_{t-K+j,c}\right)
    $$

    Sums are float32 at least. Operands of any strides are read without a copy, such as ``x.mT`` of a tensor (B,C,N).

    Args:
        x: (B,N,C), here with C channels.
        weight: (C,K). Its last column applies to the token itself, as in a causal ``nn.Conv1d``, whose weight has one
            more axis in the middle.
        bias: (C,) or None.
        state: (B,R,C), the last R >= K - 1 inputs, oldest first, in float32 at least or in x's dtype. None starts from
            zeros with R = K - 1, in float32 at least.
        activation: ``"silu"`` or None.
        mask: (B,N) bool, True = a real token. A masked token is skipped: it takes no place in a window or in the
            state, and its output is 0.
        segments: (B,N) int64, packed sequences. Equal ids are adjacent. A token sees only its own segment; a given
            state belongs to the first segment, the returned one to the last.
        cu_seqlens: (S+1,) int32 or int64, offsets of S sequences that are packed into one row, B = 1: sequence s is
            tokens cu_seqlens[s] ... cu_seqlens[s+1], and has a separate state, (S,R,C) in all.
        donate: Allows the call to overwrite ``state``.

    Returns:
        The output (B,N,C) in x's dtype and layout, and the state after the last token, in the shape and dtype of
        ``state``.

    Raises:
        ValueError: shapes, dtypes or devices do not match, K < 1, segments and cu_seqlens are both given, or a donated
            state shares memory with another operand or itself.

    Example:
        >>> import torch, longspan
        >>> x, weight = torch.randn(1, 9, 6), torch.randn(6, 4)
        >>> whole, _ = longspan.causal_convolution(x, weight, activation="silu")
        >>> first, state = longspan.causal_convolution(x[:, :5], weight, activation="silu")
        >>> rest, state = longspan.causal_convolution(x[:, 5:], weight, state=state, activation="silu")
        >>> state.shape, torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-6)
        (torch.Size([1, 3, 6]), True)

    References:
        So et al. 2021 (2109.08668), section 3. With bias and silu: Gu and Dao 2023 (2312.00752), section 3.4.
    """
    if donate and state is not None:
        check_donation(state, x=x, weight=weight, bias=bias)
    silu, unmasked = activation == "silu", mask is None and segments is None and cu_seqlens is None
    if unmasked and state is not None and (silu or activation is None):
        # Fast path for one-token decoding, which validates its own shapes.
        found = forms.step(FORMS, Convolution(x, weight, bias, state, None, None, None, silu), donate)
        if found is not None:
            return found
    options: StateOptions = {"mask": mask, "segments": segments, "cu_seqlens": cu_seqlens, "state": state}
    _check(x, weight, bias, activation, options)
    absent = None if mask is None else ~mask[..., None]
    x = x if absent is None else x.masked_fill(absent, 0.0)
    y, state = convolve(x, weight, bias, activation=activation, donate=donate, **options)
    return y if absent is None else y.masked_fill(absent, 0.0), state


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """``causal_convolution`` without checks, by the fastest form; outputs of masked tokens are arbitrary.

    Raises ValueError if a forced backend cannot serve the call.
    """
    if state is None:
        rows = weight.shape[1] - 1
        state = x.new_zeros(count_states(x, cu_seqlens), rows, x.shape[2], dtype=wide_dtype(x))
    r = Convolution(x, weight, bias, state, mask, segments, cu_seqlens, activation == "silu")
    return forms.serve(FORMS, r, donate)


def _skip(run: Callable[[Convolution], tuple[Tensor, Tensor]], r: Convolution) -> tuple[Tensor, Tensor]:
    """Compute a call with masked tokens by ``run`` on the real tokens only."""
    if r.cu_seqlens is not None:
        return by_sequence(run, r)
    x, state, mask, segments = r.x, r.state, r.mask, r.segments
    if mask is None or not x.shape[1]:
        return run(r._replace(mask=None))
    # Real tokens come first, in order; masked ones after them, where no real token sees them.
    (tokens,), rows, ids, other = gather_valid(mask, x), state.shape[1], None, None
    if segments is not None:
        (ids,), begin, end = gather_valid(mask, segments), segments[:, :1], segments[:, -1:]
        # The first or the last segment may have no real token, so that the gathered ids lack it.
        state = state.masked_fill((ids[:, :1] != begin)[..., None], 0.0)
        other = last_valid(torch.cat([begin.expand(-1, rows), ids], 1), mask, rows) != end
    y, _ = run(r._replace(x=tokens, state=state, mask=None, segments=ids))
    last = last_valid(torch.cat([state, tokens.to(state.dtype)], 1), mask, rows)
    if other is not None:
        last = last.masked_fill(other[..., None], 0.0)
    return scatter_back(mask, y), last


FORMS = Forms(
    {
        "triton": Form(triton.attend, triton.why_not, triton.step),
        "native": Form(native.attend, native.why_not, native.step),
        "torch": Form(composed.attend),
        "reference": Form(composed.reference),
    },
    exported=composed.attend,
    sharded="convolve",
    masked=_skip,
)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, options: StateOptions) -> None:
    """Raise ValueError unless the arguments of ``causal_convolution`` fit each other."""
    if activation is not None:
        known(activation, ACTIVATIONS, "activation")
    sizes = check_operands({"x": "B N C", "bias": "C", "mask": "B N"}, "x", x=x, bias=bias, **options)
    same_device(x=x, weight=weight)
    channels, state = sizes["C"], options.get("state")
    if weight.dim() != 2 or len(weight) != channels or not weight.shape[1] or not weight.is_floating_point():
        expected = f"(C, K) = ({channels}, at least 1)"
        raise ValueError(f"weight must be a floating-point tensor {expected}, not {describe(weight)}")
    if state is not None:
        rows, wide = weight.shape[1] - 1, wide_dtype(x)
        fits = state.dim() == 3 and (len(state), state.shape[2]) == (sizes["sequences"], channels)
        if not fits or state.shape[1] < rows or state.dtype not in (wide, x.dtype):
            expected = f"({sizes['sequences']}, at least {rows}, {channels})"
            raise ValueError(
                f"state must be {' or '.join(map(str, dict.fromkeys((wide, x.dtype))))} (B, R, C) = {expected}, "
                f"not {describe(state)}"
            )
