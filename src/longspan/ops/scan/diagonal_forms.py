"""The diagonal scan in torch: h_t = e^g_t h_{t-1} + x_t, token by token and in a logarithmic number of steps."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import transformed
from ..packed import by_sequence
from .operands import Diagonal

CHUNK = 64  # tokens that are combined in log2(64) steps; the state then passes to the next ones


def borders(segments: Tensor | None, like: Tensor) -> Tensor:
    """Return at which tokens the state is cleared: segments (B,N), like (B,N,...) -> (B,N,1) bool."""
    batch, n = like.shape[:2]
    if segments is None:
        return torch.zeros(batch, n, 1, dtype=torch.bool, device=like.device)
    return F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))[:, :n, None]


def reference(r: Diagonal) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in the dtype of the state."""
    return by_sequence(_loop, r)


def _loop(r: Diagonal) -> tuple[Tensor, Tensor]:
    x, g, state, mask, segments, _ = r
    out, clear, wide = [], borders(segments, x), state.dtype
    state = state.clone()
    if mask is not None:
        x, g = (t.masked_fill(~mask[..., None], 0.0) for t in (x, g))
    for t in range(x.shape[1]):
        kept = torch.where(clear[:, t], 0.0, state)
        log_decay = g[:, t].to(wide)
        # Selected before the product, since 0 * inf is NaN, in its gradient too.
        cleared = log_decay == -torch.inf
        after = x[:, t].to(wide) + log_decay.masked_fill(cleared, 0.0).exp() * kept.masked_fill(cleared, 0.0)
        state = after if mask is None else torch.where(mask[:, t, None], after, kept)
        out.append(state)
    y = torch.stack(out, 1) if out else torch.zeros_like(x, dtype=wide)
    return (y if mask is None else y.masked_fill(~mask[..., None], 0.0)).to(x.dtype), state


def attend(r: Diagonal) -> tuple[Tensor, Tensor]:
    """The same in chunks. Memory is O(N C), and so is that of the backward pass."""
    return by_sequence(_attend, r)


def _attend(r: Diagonal) -> tuple[Tensor, Tensor]:
    x, g, state, mask, segments, _ = r
    dtype, x, g = x.dtype, x.to(state.dtype), g.to(state.dtype)
    if not x.numel():
        return x.to(dtype, copy=True), state.clone()
    if mask is not None:
        x, g = (t.masked_fill(~mask[..., None], 0.0) for t in (x, g))
    h = scan(x, g, borders(segments, x) | (g == -torch.inf), state)
    y = h if mask is None else h.masked_fill(~mask[..., None], 0.0)
    return y.to(dtype), h[:, -1].clone()


def scan(x: Tensor, g: Tensor, clear: Tensor, state: Tensor) -> Tensor:
    """All states: x, g (B,N,C), clear (B,N,1 or C) bool, where nothing of earlier states is kept, state (B,C)."""
    # Transforms follow operations of torch only.
    found: Any = doubled(x, g, clear, state) if transformed() else _Scan.apply(x, g, clear, state)
    return found


def doubled(x: Tensor, g: Tensor, clear: Tensor, state: Tensor) -> Tensor:
    """``scan`` by doubling: after step i, each state holds the last 2^i inputs of its chunk.

    No factor exceeds 1 for log decays up to 0. What is cleared is selected, never multiplied by 0, so that NaN and
    infinity do not survive it.
    """
    factors, out = g.masked_fill(clear, 0.0).exp(), []
    for start in range(0, x.shape[1], CHUNK):
        h, a, cut = (t[:, start : start + CHUNK] for t in (x, factors, clear))
        first = h[:, :1] + (a[:, :1] * state[:, None].masked_fill(cut[:, :1], 0.0))
        h, step = torch.cat([first, h[:, 1:]], 1), 1
        while step < h.shape[1]:
            stop = cut[:, step:]
            more = torch.addcmul(h[:, step:], a[:, step:], h[:, :-step].masked_fill(stop, 0.0))
            h = torch.cat([h[:, :step], more], 1)
            a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step].masked_fill(stop, 1.0)], 1)
            cut = torch.cat([cut[:, :step], stop | cut[:, :-step]], 1)
            step *= 2
        state = h[:, -1]
        out.append(h)
    return torch.cat(out, 1)


class _Scan(torch.autograd.Function):
    """``doubled``, whose gradient is a scan from the last token to the first: it keeps only its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, clear: Tensor, state: Tensor) -> Tensor:
        h = doubled(x, g, clear, state)
        ctx.save_for_backward(g, clear, state, h)
        return h

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        g, clear, state, h = ctx.saved_tensors
        (grad,) = upstream
        # The state of a token reaches the next one with the factor of the next one.
        later = torch.cat([g[:, 1:], torch.zeros_like(g[:, :1])], 1)
        cut = torch.cat([clear[:, 1:], torch.zeros_like(clear[:, :1])], 1)
        d = scan(grad.flip(1), later.flip(1), cut.flip(1), torch.zeros_like(state)).flip(1)
        factor = g.masked_fill(clear, 0.0).exp()
        before = torch.cat([state[:, None], h[:, :-1]], 1).masked_fill(clear, 0.0)
        kept = (d * factor).masked_fill(clear, 0.0)
        return d, kept * before, None, kept[:, 0]
