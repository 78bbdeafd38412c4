"""The causal depth-wise convolution over the last K tokens of each channel, with a state for streams."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._utils.spec import known
from ..arguments import check_mask, check_segments, describe
from ..backends import choose_backend, log_backend, resolve_backend
from ..operands import check_donation, check_stored, materialize_neg, same_device
from ..packed import check_packed
from ..rows import gather_valid, last_valid, scatter_back
from ..shards import active_shards
from ..tensors import upcast_half
from . import native as kernels
from . import triton

OP = "the causal convolution"
SERVED = ("reference", "torch", "native", "triton")
ACTIVATIONS = {"silu": F.silu}


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
    if mask is None and segments is None and cu_seqlens is None and state is not None:
        # Fast path for one-token decoding, which validates its own shapes.
        found = _token(x, weight, bias, state, activation, donate)
        if found is not None:
            return found
    check(x, weight, bias, state, activation, mask, segments, cu_seqlens)
    options: dict[str, Any] = {
        "activation": activation,
        "segments": segments,
        "cu_seqlens": cu_seqlens,
        "donate": donate,
    }
    if mask is None:
        return convolve(x, weight, bias, state, **options)
    absent = ~mask[..., None]
    y, state = convolve(x.masked_fill(absent, 0.0), weight, bias, state, mask=mask, **options)
    return y.masked_fill(absent, 0.0), state


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
    if (shards := active_shards()) is not None:
        options: dict[str, Any] = {"activation": activation, "mask": mask, "segments": segments}
        return shards.convolve(convolve, x, weight, bias, state, cu_seqlens=cu_seqlens, **options)
    if state is None:
        sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        state = x.new_zeros(sequences, weight.shape[1] - 1, x.shape[2], dtype=upcast_half(x[:0]).dtype)
    if not x.shape[1]:
        mask = segments = None
    if mask is not None:
        return _skipping(x, weight, bias, state, mask, activation, segments, cu_seqlens)
    if segments is None and cu_seqlens is None:
        found = _token(x, weight, bias, state, activation, donate)
        if found is not None:
            return found
    x, weight, bias, state = materialize_neg(x, weight, bias, state)
    assert state is not None
    options = {"activation": activation, "segments": segments, "cu_seqlens": cu_seqlens}
    why_not = {
        "triton": triton.why_not(x, weight, bias, state, segments, cu_seqlens),
        "native": kernels.why_not(x, weight, bias, state, segments, cu_seqlens),
    }
    match choose_backend(OP, SERVED, why_not):
        case "triton":
            return triton.convolve(x, weight, bias, state, composed=composed, **options)
        case "native":
            return kernels.convolve(x, weight, bias, state, composed=composed, **options)
        case "reference":
            return reference(x, weight, bias, state, **options)
        case _:
            return composed(x, weight, bias, state, **options)


def _skipping(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    mask: Tensor,
    activation: str | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``convolve`` on the real tokens only, mask (B,N)."""
    if cu_seqlens is not None:
        outputs, states = [x[:, :0]], [state[:0]]
        for s, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            options: dict[str, Any] = {"activation": activation, "mask": mask[:, begin:end]}
            y, last = convolve(x[:, begin:end], weight, bias, state[s : s + 1], **options)
            outputs.append(y)
            states.append(last)
        return torch.cat(outputs, 1), torch.cat(states)
    # Real tokens come first, in order; masked ones after them, where no real token sees them.
    (tokens,), rows, ids, other = gather_valid(mask, x), state.shape[1], None, None
    if segments is not None:
        (ids,), begin, end = gather_valid(mask, segments), segments[:, :1], segments[:, -1:]
        # The first or the last segment may have no real token, so that the gathered ids lack it.
        state = state.masked_fill((ids[:, :1] != begin)[..., None], 0.0)
        other = last_valid(torch.cat([begin.expand(-1, rows), ids], 1), mask, rows) != end
    y, _ = convolve(tokens, weight, bias, state, activation=activation, segments=ids)
    last = last_valid(torch.cat([state, tokens.to(state.dtype)], 1), mask, rows)
    if other is not None:
        last = last.masked_fill(other[..., None], 0.0)
    return scatter_back(mask, y), last


def _token(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None, donate: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the ``step`` of the kernels for x's device, or of the forced backend; None if they do not serve it."""
    if x.dim() != 3 or x.shape[1] != 1:
        return None
    name = resolve_backend(OP, SERVED, "triton" if x.is_cuda else "native")
    if name not in ("native", "triton"):
        return None
    take = (triton if name == "triton" else kernels).step
    found = take(x, weight, bias, state, activation=activation, donate=donate)
    if found is not None:
        log_backend(OP, name)
    return found


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: str | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in float32 at least; arguments as in ``convolve``."""
    wide, reach = upcast_half(x), weight.shape[1] - 1
    if cu_seqlens is not None:
        borders = cu_seqlens.tolist()
        parts = [
            reference(
                x[:, begin:end], weight, bias, state[s : s + 1], activation=activation, segments=None, cu_seqlens=None
            )
            for s, (begin, end) in enumerate(pairwise(borders))
        ]
        out, ends = zip(*parts, strict=True) if parts else ((), ())
        return torch.cat(out, 1) if parts else torch.zeros_like(x), torch.cat(ends) if parts else state.clone()
    recent, out = state.to(wide.dtype), []
    for t in range(x.shape[1]):
        if segments is not None and t > 0:
            recent = torch.where((segments[:, t] == segments[:, t - 1])[:, None, None], recent, 0.0)
        window = torch.cat([recent, wide[:, t, None]], 1)  # (B,R+1,C)
        y = (window[:, window.shape[1] - reach - 1 :] * upcast_half(weight).mT).sum(1)
        y = y if bias is None else y + upcast_half(bias)
        out.append(y if activation is None else ACTIVATIONS[activation](y))
        recent = window[:, 1:]
    return (torch.stack(out, 1) if out else torch.zeros_like(x)).to(x.dtype), recent.to(state.dtype).clone()


def composed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: str | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A few operations on all tokens, with derivatives of any order; arguments as in ``convolve``."""
    wide, taps, rows = upcast_half(x), upcast_half(weight), state.shape[1]
    past, n, reach = state.to(wide.dtype), x.shape[1], weight.shape[1] - 1
    if cu_seqlens is not None:
        return _packed(wide, taps, bias, past, activation, cu_seqlens, x.dtype, state.dtype)
    tokens = torch.cat([past, wide], 1)  # (B,R+N,C)
    ids = None if segments is None else torch.cat([segments[:, :1].expand(-1, rows), segments], 1)
    y = wide * taps[:, reach]
    for j in range(reach):
        tap = tokens[:, rows - reach + j : rows - reach + j + n]
        if ids is not None:
            other = ids[:, rows - reach + j : rows - reach + j + n] != ids[:, rows:]
            tap = tap.masked_fill(other[..., None], 0.0)
        y = torch.addcmul(y, tap, taps[:, j])
    last = tokens[:, n:]
    if ids is not None:
        last = last.masked_fill((ids[:, n:] != ids[:, -1:])[..., None], 0.0)
    # A copy, since a view would keep all tokens alive.
    return _finished(y, bias, activation).to(x.dtype), last.to(state.dtype, copy=True)


def _packed(
    wide: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    past: Tensor,
    activation: str | None,
    cu_seqlens: Tensor,
    dtype: torch.dtype,
    kept: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The packed sequences of one row, which read earlier tokens from one list of all states and tokens."""
    sequences, rows = past.shape[:2]
    n, reach = wide.shape[1], taps.shape[1] - 1
    listed = torch.cat([past.flatten(0, 1), wide[0]])  # (S R + N, C)
    borders = cu_seqlens.long()
    at = torch.arange(n, device=wide.device)
    owner = torch.searchsorted(borders, at, right=True) - 1  # (N,)

    def place(position: Tensor, owner: Tensor) -> Tensor:
        """Return where tokens are listed; those before the start of their sequence are rows of its state."""
        before = borders[owner] - position
        return torch.where(before > 0, (owner + 1) * rows - before, sequences * rows + position)

    y = wide[0] * taps[:, reach]
    for j in range(reach):
        y = torch.addcmul(y, listed[place(at - reach + j, owner)], taps[:, j])
    every = torch.arange(sequences, device=wide.device)[:, None].expand(-1, rows)
    last = listed[place(borders[1:, None] - rows + torch.arange(rows, device=wide.device), every)]
    return _finished(y, bias, activation).to(dtype)[None], last.to(kept)


def _finished(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    y = y if bias is None else y + upcast_half(bias)
    return y if activation is None else ACTIVATIONS[activation](y)


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    activation: str | None,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of ``causal_convolution`` fit each other."""
    if activation is not None:
        known(activation, ACTIVATIONS, "activation")
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor (B, N, C), not {describe(x)}")
    same_device(x=x, weight=weight, bias=bias, state=state, mask=mask, segments=segments, cu_seqlens=cu_seqlens)
    check_stored("the state", state)
    batch, n, channels = x.shape
    if weight.dim() != 2 or len(weight) != channels or not weight.shape[1] or not weight.is_floating_point():
        expected = f"(C, K) = ({channels}, at least 1)"
        raise ValueError(f"weight must be a floating-point tensor {expected}, not {describe(weight)}")
    if bias is not None and (tuple(bias.shape) != (channels,) or not bias.is_floating_point()):
        raise ValueError(f"bias must be a floating-point tensor {(channels,)}, not {describe(bias)}")
    if mask is not None:
        check_mask("mask", mask, (batch, n))
    if segments is not None:
        check_segments(segments, (batch, n))
    sequences = check_packed(cu_seqlens, batch, n, segments)
    if state is not None:
        rows, wide = weight.shape[1] - 1, upcast_half(x[:0]).dtype
        fits = state.dim() == 3 and (len(state), state.shape[2]) == (sequences, channels) and state.shape[1] >= rows
        if not fits or state.dtype not in (wide, x.dtype):
            expected = f"({sequences}, at least {rows}, {channels})"
            raise ValueError(
                f"state must be {' or '.join(map(str, dict.fromkeys((wide, x.dtype))))} (B, R, C) = {expected}, "
                f"not {describe(state)}"
            )
