"""The convolution in torch: by its definition, and as a few operations on all tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packed import by_sequence
from ..tensors import upcast_half
from .operands import Convolution


def reference(r: Convolution) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in float32 at least."""
    return by_sequence(_loop, r)


def _loop(r: Convolution) -> tuple[Tensor, Tensor]:
    wide, segments, out = upcast_half(r.x), r.segments, []
    recent = r.state.to(wide.dtype)
    for t in range(wide.shape[1]):
        if segments is not None and t > 0:
            recent = torch.where((segments[:, t] == segments[:, t - 1])[:, None, None], recent, 0.0)
        window = torch.cat([recent, wide[:, t, None]], 1)  # (B,R+1,C)
        y = (window[:, window.shape[1] - r.weight.shape[1] :] * upcast_half(r.weight).mT).sum(1)
        out.append(_finished(y, r))
        recent = window[:, 1:]
    return (torch.stack(out, 1) if out else torch.zeros_like(r.x)).to(r.x.dtype), recent.to(r.state.dtype).clone()


def attend(r: Convolution) -> tuple[Tensor, Tensor]:
    """A few operations on all tokens, with derivatives of any order."""
    wide, taps, rows, segments = upcast_half(r.x), upcast_half(r.weight), r.state.shape[1], r.segments
    past, n, reach = r.state.to(wide.dtype), wide.shape[1], taps.shape[1] - 1
    if r.cu_seqlens is not None:
        return _packed(r, r.cu_seqlens)
    tokens = torch.cat([past, wide], 1)  # (B,R+N,C)
    ids = None if segments is None or not n else torch.cat([segments[:, :1].expand(-1, rows), segments], 1)
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
    return _finished(y, r).to(r.x.dtype), last.to(r.state.dtype, copy=True)


def _packed(r: Convolution, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The packed sequences of one row, which read earlier tokens from one list of all states and tokens."""
    wide, taps = upcast_half(r.x), upcast_half(r.weight)
    sequences, rows = r.state.shape[:2]
    n, reach = wide.shape[1], taps.shape[1] - 1
    listed = torch.cat([r.state.to(wide.dtype).flatten(0, 1), wide[0]])  # (S R + N, C)
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
    return _finished(y, r).to(r.x.dtype)[None], last.to(r.state.dtype)


def _finished(y: Tensor, r: Convolution) -> Tensor:
    y = y if r.bias is None else y + upcast_half(r.bias)
    return F.silu(y) if r.silu else y
