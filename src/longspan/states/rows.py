"""Rows as a mechanism likes them: real tokens side by side, and one sequence each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Run = Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Any]]


def in_front(run: Run, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
    """``run(x, state, real)`` on rows whose real tokens come first, in their order; its outputs back in their places.

    x (B,N,.), mask (B,N) bool -> what ``run`` gives, (B,N,.), 0 at masked tokens, and its state. ``real`` (B,N) says
    which tokens of the moved rows exist, None where all do.
    """
    if mask is None:
        return run(x, state, None)
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[..., None]
    real = torch.arange(x.shape[1], device=x.device) < mask.sum(1, keepdim=True)
    y, state = run(x.gather(1, order.expand_as(x)), state, real)
    y = y.masked_fill(~real[..., None], 0.0)
    return torch.zeros_like(y).scatter(1, order.expand_as(y), y), state


def apart(run: Run, x: Tensor, state: Any, mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Any]:
    """``run(x, state, mask)`` with each packed sequence as a row of its own, padded at the end; outputs back in place.

    x (B,N,.), segments (B,N) int64. The first sequence of each row goes on with the state, others with one of zeros;
    what comes back are the states of the last ones.
    """
    if segments is None or not x.numel():
        return run(x, state, mask)
    tokens = torch.arange(x.shape[1], device=x.device).expand_as(segments)
    border = torch.ones_like(segments, dtype=torch.bool)
    border[:, 1:] = segments[:, 1:] != segments[:, :-1]
    row = border.flatten().cumsum(0).view_as(segments) - 1  # (B,N), counted through the batch
    place = tokens - torch.where(border, tokens, 0).cummax(1).values
    rows, longest = int(row[-1, -1]) + 1, int(place.max()) + 1
    real = torch.zeros(rows, longest, dtype=torch.bool, device=x.device)
    real[row, place] = True if mask is None else mask

    def first(part: Tensor) -> Tensor:
        return part.new_zeros(rows, *part.shape[1:]).index_copy(0, row[:, 0], part)

    alone = x.new_zeros(rows, longest, x.shape[-1]).index_put((row, place), x)
    y, after = run(alone, None if state is None else pytree.tree_map(first, state), real)
    return y[row, place], None if state is None else pytree.tree_map(lambda part: part[row[:, -1]], after)
