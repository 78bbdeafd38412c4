"""The loops over the spans of a sequence that the forms in chunks share, forward and backward.

Axes and shapes as in ``chunks``. A place is the first token of a span, its chunks, and the tokens of a chunk.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Place = tuple[int, int, int]
# The state before a span (B,G,R,D,E) -> its outputs (B,G,R,L,C,E), the state after it.
Advance = Callable[[Place, Tensor], tuple[Tensor, Tensor]]
# The state before a span and the gradient of that after it -> the gradients of its operands (B,G,R or 1,L,C,.), None
# for those that are not given, and of the state before it.
Retreat = Callable[[Place, Tensor, Tensor], tuple[Sequence[Tensor | None], Tensor]]


def forward(
    advance: Advance, places: list[Place], v: Tensor, state: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o (B,H,N,E), the last state (B,H,D,E), and the state before each span but the first."""
    o, starts = torch.empty_like(v), state.new_empty(len(places) - 1, *state.shape)
    end = state.unflatten(1, (groups, -1))
    for i, place in enumerate(places):
        if i > 0:
            starts[i - 1] = end.flatten(1, 2)
        out, end = advance(place, end)
        _store(o, out, place)
    return o, end.flatten(1, 2).contiguous(), starts


def composed(
    advance: Advance, places: list[Place], v: Tensor, state: Tensor, groups: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o, 0 at masked tokens, and the last state by operations with derivatives of any order."""
    end, found = state.unflatten(1, (groups, -1)), []
    for place in places:
        out, end = advance(place, end)
        found.append(_tokens(out, place))
    o = torch.cat(found, 2).to(v.dtype)
    return o if mask is None else o.masked_fill(~mask[:, None, :, None], 0.0), end.flatten(1, 2)


def backward(
    retreat: Retreat,
    places: list[Place],
    grads: Sequence[Tensor | None],
    state: Tensor,
    starts: Tensor,
    grad_end: Tensor,
    groups: int,
) -> Tensor:
    """Write the gradients of the operands to ``grads``; return that of the first state.

    ``state`` is the first one, ``starts`` those that ``forward`` returns, ``grad_end`` the gradient of the last one.
    """
    after = grad_end.unflatten(1, (groups, -1))
    for i in reversed(range(len(places))):
        start = (starts[i - 1] if i > 0 else state).unflatten(1, (groups, -1))
        parts, after = retreat(places[i], start, after)
        for into, part in zip(grads, parts, strict=True):
            if into is not None and part is not None:
                _store(into if into.dim() == 4 else into[..., None], part, places[i])
    return after.flatten(1, 2).contiguous()


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
