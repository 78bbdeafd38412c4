"""RWKV-4: an exponential average by channel, as two diagonal scans, and shifts by one token."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modules.token_shift import shift
from ...ops.scan import diagonal_scan
from ...ops.tensors import upcast_half, wide_dtype
from .packing import real, sequences
from .running import BEFORE, at_most_zero, largest
from .states import carried

State = tuple[Tensor, Tensor, Tensor]


def attention(self, hidden: Tensor, state: list[Tensor] | None = None, use_cache: bool = False):
    """Replace ``RwkvSelfAttention.forward``; packed rows stay separate, and padding is skipped.

    Args:
        hidden: (B,N,C).
        state: states of all layers: five tensors (B,C,layers), overwritten in this layer; or None.
        use_cache: ignored; the model creates ``state`` for it.

    Returns:
        Outputs (B,N,C), and ``state``.

    References:
        Peng et al. 2023 (2305.13048), eq. 11 to 19.
    """
    layer = self.layer_id
    shifted, before = _shifted(hidden, None if state is None else state[1][:, :, layer])
    k, v, r = (
        project(torch.lerp(shifted, hidden, mix))
        for project, mix in (
            (self.key, self.time_mix_key),
            (self.value, self.time_mix_value),
            (self.receptance, self.time_mix_receptance),
        )
    )
    past = None
    if state is not None:
        num, den, m = (carried(one[:, :, layer], wide_dtype(k)) for one in state[2:])
        past = num, den, m
    ids, mask = sequences(*hidden.shape[:2]), real(hidden.shape[0], hidden.shape[1])
    o, last = average(self.time_decay, self.time_first, k, v, past, ids, mask)
    if state is not None:
        state[1][:, :, layer] = before
        for one, new in zip(state[2:], last, strict=True):
            one[:, :, layer] = new
    return self.output(torch.sigmoid(r) * o), state


def feed_forward(self, hidden: Tensor, state: list[Tensor] | None = None):
    """Replace ``RwkvFeedForward.forward``; arguments and results are as in ``attention``."""
    layer = self.layer_id
    shifted, before = _shifted(hidden, None if state is None else state[0][:, :, layer])
    k = self.key(torch.lerp(shifted, hidden, self.time_mix_key))
    r = self.receptance(torch.lerp(shifted, hidden, self.time_mix_receptance))
    if state is not None:
        state[0][:, :, layer] = before
    return torch.sigmoid(r) * self.value(torch.relu(k).square()), state


def average(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: State | None,
    ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, State]:
    r"""The exponential average of RWKV-4, with its two sums scaled by the largest exponent so far.

    Args:
        time_decay: (C,); the decay is $e^{-e^{\text{time\_decay}}}$.
        time_first: (C,), added to the exponent of the token itself.
        key: (B,N,C).
        value: (B,N,C).
        state: numerator, denominator and largest exponent, (B,C) each; None means no token.
        ids: (B,N), the number of each token's sequence, or None.
        mask: (B,N) bool, False on padding, which changes no state and whose outputs are arbitrary; or None.

    Returns:
        Outputs (B,N,C) in the key's dtype, and the last state in float32 or wider.
    """
    k, v, w, u = upcast_half(key), upcast_half(value), -upcast_half(time_decay).exp(), upcast_half(time_first)
    if state is None:
        zero = torch.zeros_like(k[:, 0])
        state = zero, zero, zero + BEFORE
    num0, den0, m0 = state
    starts = None if ids is None else F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
    # Float32 would round a large exponent by more than its exponential may be off.
    now, w = k.double() + u.double(), w.expand_as(k)
    if mask is not None:
        k, w = k.masked_fill(~mask[..., None], BEFORE), w.masked_fill(~mask[..., None], 0.0)
    # The outputs do not depend on m.
    with torch.no_grad():
        m, previous = largest(k, w, m0, starts, BEFORE)
    g = at_most_zero(w.double() + (previous - m)).to(k.dtype)
    e = (k.double() - m).to(k.dtype).exp()
    if mask is not None:
        e = e.masked_fill(~mask[..., None], 0.0)  # before the first token, m is that of padding
    num, num_last = diagonal_scan(e * v, g, segments=ids, state=num0, return_state=True)
    den, den_last = diagonal_scan(e, g, segments=ids, state=den0, return_state=True)
    num, den = (torch.cat([at[:, None], all_[:, :-1]], 1) for at, all_ in ((num0, num), (den0, den)))
    if starts is not None:
        num, den = (t.masked_fill(starts[..., None], 0) for t in (num, den))
    with torch.no_grad():
        top = torch.maximum(previous, now)
        old = (previous - top).to(k.dtype).exp()
    own = (now - top).to(k.dtype).exp()
    o = (old * num + own * v) / (old * den + own)
    # The state is exact for the rounded exponent.
    end = m[:, -1].to(k.dtype)
    left = (m[:, -1] - end).exp().to(k.dtype)
    return o.to(key.dtype), (num_last * left, den_last * left, end)


def reordered(original: None) -> Callable:
    """Give ``RwkvForCausalLM`` a method that reorders states for beam search, which the original refuses."""
    del original

    def _reorder_cache(self, state: list[Tensor], beam_idx: Tensor) -> list[Tensor]:
        return [one.index_select(0, beam_idx.to(one.device)) for one in state]

    return _reorder_cache


def _shifted(x: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the token before each of x (B,N,C), and the last one (B,C); ``last`` (B,C) or 0 is before the first."""
    before = torch.zeros_like(x[:, 0]) if last is None else carried(last, x.dtype)
    shifted, last = shift(x, before[:, None], mask=real(x.shape[0], x.shape[1]), segments=sequences(*x.shape[:2]))
    return shifted, last[:, 0]
