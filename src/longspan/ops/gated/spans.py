"""The loops over the spans of a sequence that the forms in chunks share, forward and backward.

Axes and shapes as in ``chunks``. A place is the first token of a span, its chunks, and the tokens of a chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..custom_ops import contiguous_like

Place = tuple[int, int, int]
# The state before a span (B,G,R,D,E) -> its outputs (B,G,R,L,C,E), the state after it.
Advance = Callable[[Place, Tensor], tuple[Tensor, Tensor]]
# The state before a span and the gradient of that after it -> the gradients of its operands (B,G,R or 1,L,C,.), None
# for those that are not given, and of the state before it.
Retreat = Callable[[Place, Tensor, Tensor], tuple[Sequence[Tensor | None], Tensor]]


def forward(advance: Advance, r: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return o (B,H,N,E), the last state, and the state before each span but the first.

    ``r`` has v, k, the first state and the places of the spans.
    """
    places, end = r.places, r.state.unflatten(1, (r.k.shape[1], -1))
    o, starts = torch.empty_like(r.v), r.state.new_empty(len(places) - 1, *r.state.shape)
    for i, place in enumerate(places):
        if i > 0:
            starts[i - 1] = end.flatten(1, 2)
        out, end = advance(place, end)
        _store(o, out, place)
    return o, end.flatten(1, 2).contiguous(), starts


def composed(advance: Advance, r: Any) -> tuple[Tensor, Tensor]:
    """Return o, 0 at masked tokens, and the last state by operations with derivatives of any order."""
    end, parts = r.state.unflatten(1, (r.k.shape[1], -1)), []
    with torch.autocast(r.q.device.type, enabled=False):
        for place in r.places:
            out, end = advance(place, end)
            parts.append(_tokens(out, place))
    o = torch.cat(parts, 2).to(r.v.dtype)
    return o if r.mask is None else o.masked_fill(~r.mask[:, None, :, None], 0.0), end.flatten(1, 2)


def backward(
    retreat: Retreat, r: Any, inputs: Sequence[Tensor | None], starts: Tensor, grad_end: Tensor
) -> list[Tensor | None]:
    """Return the gradients of ``inputs`` (B,H,N,.) and of the first state.

    ``starts`` are the states that ``forward`` returns, ``grad_end`` is the gradient of the last one.
    """
    grads = [None if t is None else torch.empty_like(t) for t in inputs]
    groups, after = r.k.shape[1], grad_end.unflatten(1, (r.k.shape[1], -1))
    firsts = [r.state, *starts]
    with torch.autocast(r.q.device.type, enabled=False):
        for place, first in reversed([*zip(r.places, firsts, strict=True)]):
            parts, after = retreat(place, first.unflatten(1, (groups, -1)), after)
            for into, part in zip(grads, parts, strict=True):
                if into is not None and part is not None:
                    _store(into if into.dim() == 4 else into[..., None], part, place)
    clear_masked(r.mask, *(t for t in grads if t is not None))
    return [*grads, after.flatten(1, 2).contiguous()]


def shapes(r: Any, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate what ``forward`` returns."""
    return torch.empty_like(r.v), contiguous_like(r.state), r.state.new_empty(len(r.places) - 1, *r.state.shape)


def clear_masked(mask: Tensor | None, *tensors: Tensor) -> None:
    """Set (B,H,N) or (B,H,N,.) to 0 at masked tokens, in place."""
    if mask is not None:
        for t in tensors:
            t.masked_fill_(~(mask[:, None, :, None] if t.dim() == 4 else mask[:, None]), 0.0)


def _store(into: Tensor, chunks: Tensor, place: Place) -> None:
    """Write chunks (B,G,R,L,C,E) to their tokens of (B,H,N,E)."""
    start, count, width = place
    into[:, :, start : start + count * width] = _tokens(chunks, place)


def _tokens(chunks: Tensor, place: Place) -> Tensor:
    """Return chunks (B,G,R,L,C,E) without padding as (B,H,tokens,E)."""
    return chunks[..., : place[2], :].flatten(3, 4).flatten(1, 2)
