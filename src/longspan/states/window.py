"""A ring buffer of the last keys and values: the state of attention with a bounded look-back."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.tensors import positions
from .counters import check_counts


class Window(NamedTuple):
    """Keys and values of the last S real tokens; slot p mod S holds position p."""

    keys: Tensor  # (B,H,S,D)
    values: Tensor  # (B,H,S,E)
    position: Tensor  # (B,) int64, real tokens so far


class WindowView(NamedTuple):
    """Keys and values of one call with their positions: (B,H,M,D), (B,H,M,E), at (B,N), slots (B,M), visible (B,N,M).

    ``visible`` holds for every pattern: the slot is in use, the token is real, the segment is the same.
    """

    keys: Tensor
    values: Tensor
    at: Tensor
    slots: Tensor
    visible: Tensor


def empty(batch: int, heads: int, slots: int, dim: int, like: Tensor) -> Window:
    """Return a window without tokens, in the dtype and on the device of ``like``."""
    keys = like.new_zeros(batch, heads, slots, dim)
    return Window(keys, keys.clone(), torch.zeros(batch, dtype=torch.long, device=like.device))


def extend(
    window: Window,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    donate: bool = False,
) -> tuple[WindowView, Window]:
    """Add tokens to a window.

    Args:
        window: The window to continue.
        k: (B,H,N,D) keys of the new tokens.
        v: (B,H,N,E) values of the new tokens.
        mask: (B,N) bool, True on real tokens.
        segments: (B,N) int64. The first sequence continues the window; the last one leaves its tokens there.
        donate: Overwrite the given window, which otherwise stays intact.

    Returns:
        What the new tokens may see (old and new tokens), and the next window.

    Raises:
        ValueError: For a window on the CPU with a negative position, except while a compiler traces.
    """
    check_counts("position", window.position)
    k, v = k.to(window.keys.dtype), v.to(window.values.dtype)  # they differ under autocast
    (batch, _, n, _), slots = k.shape, window.keys.shape[2]
    if n == 1 and mask is None:
        return _step(window, k, v, donate)
    at, end = positions(k.transpose(1, 2), window.position, mask=mask, segments=segments)
    old = held(window)
    real = torch.ones(batch, n, dtype=torch.bool, device=k.device) if mask is None else mask
    seen_old, seen_new = (old >= 0)[:, None, :].expand(batch, n, slots), real[:, None, :].expand(batch, n, n)
    last = real
    if segments is not None:
        same = segments[:, :, None] == segments[:, None, :]
        seen_old, seen_new = seen_old & (segments == segments[:, :1])[:, :, None], seen_new & same
        last = real & (segments == segments[:, -1:])
    view = WindowView(
        torch.cat([window.keys, k], 2),
        torch.cat([window.values, v], 2),
        at,
        torch.cat([old, at], 1),
        torch.cat([seen_old, seen_new], 2),
    )
    # If there are more tokens than slots, only the last ones are written, so that no slot is written twice.
    kept = last & (at >= end[:, None] - slots)
    if donate and not torch.compiler.is_compiling():
        return view, Window(*_write_in_place(window, k, v, at, kept), end)
    if not n:
        return view, window
    # Each slot gets the token of the largest position that belongs into it.
    wanted = end[:, None] - 1 - (end[:, None] - 1 - torch.arange(slots, device=k.device)) % slots
    hit = (at[:, None, :] == wanted[:, :, None]) & kept[:, None, :]  # (B,S,N)
    fresh, where = hit.any(-1)[:, None, :, None], hit.int().argmax(-1)[:, None, :, None]

    def written(new: Tensor, before: Tensor) -> Tensor:
        return torch.where(fresh, new.gather(2, where.expand(-1, new.shape[1], -1, new.shape[-1])), before)

    return view, Window(written(k, window.keys), written(v, window.values), end)


def tail(window: Window, k: Tensor, v: Tensor) -> Window:
    """Return the window after n more tokens of every row; k (B,H,n,D), v (B,H,n,E)."""
    slots, n = window.keys.shape[2], k.shape[2]
    skipped = window._replace(position=window.position + max(0, n - slots))
    return extend(skipped, k[:, :, -slots:], v[:, :, -slots:])[1]


def _step(window: Window, k: Tensor, v: Tensor, donate: bool) -> tuple[WindowView, Window]:
    """One token for every row: it takes the slot of the token that is out of reach."""
    slots = window.keys.shape[2]
    where = (torch.arange(slots, device=k.device) == (window.position % slots)[:, None])[:, None, :, None]
    if donate and not torch.compiler.is_compiling():
        rows = torch.arange(len(k), device=k.device)
        window.keys[rows, :, window.position % slots] = k[:, :, 0]
        window.values[rows, :, window.position % slots] = v[:, :, 0]
        new = Window(window.keys, window.values, window.position + 1)
    else:
        new = Window(torch.where(where, k, window.keys), torch.where(where, v, window.values), window.position + 1)
    at = held(new)
    return WindowView(new.keys, new.values, window.position[:, None], at, (at >= 0)[:, None, :]), new


def held(window: Window) -> Tensor:
    """Return the position in each slot, (B,S) int64; negative for an empty slot."""
    slots = window.keys.shape[2]
    newest = window.position[:, None] - 1
    return newest - (newest - torch.arange(slots, device=newest.device)) % slots


def _write_in_place(window: Window, k: Tensor, v: Tensor, at: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    rows, tokens = kept.nonzero(as_tuple=True)
    slots = at[rows, tokens] % window.keys.shape[2]
    window.keys[rows, :, slots] = k[rows, :, tokens]
    window.values[rows, :, slots] = v[rows, :, tokens]
    return window.keys, window.values
