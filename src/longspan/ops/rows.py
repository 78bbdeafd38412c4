"""Padded and packed rows, rearranged so that a mechanism sees only real tokens of one sequence.

There are two ways. ``ragged`` cuts sequences out and makes one call per length, so there is no padding.
``split_packed`` makes one call for all sequences, on rows that begin with their real tokens, and continues states.
``map_sequences`` chooses the first where it can. ``gather_valid`` and ``scatter_back`` move tokens within rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .operands import followed, in_onnx

Run = Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Any]]


def gather_valid(mask: Tensor | None, *tensors: Tensor, axis: int = 1) -> tuple[Tensor, ...]:
    """Move the real tokens of each row to its front, in order: tensors (B,...,N,...), mask (B,N)."""
    if mask is None:
        return tensors
    order = (~mask).to(torch.uint8)
    if in_onnx():  # which has no stable sort
        order = (order.long() * mask.shape[1] + torch.arange(mask.shape[1])).argsort(dim=1)
    else:
        order = order.argsort(dim=1, stable=True)
    return tuple(pick(x, order, axis) for x in tensors)


def scatter_back(mask: Tensor | None, x: Tensor, axis: int = 1) -> Tensor:
    """Undo ``gather_valid``: x (B,...,N,...) back in the order of the call; masked tokens get arbitrary values."""
    return x if mask is None else pick(x, rank(mask), axis)


def rank(mask: Tensor) -> Tensor:
    """Return where ``gather_valid`` puts each real token: mask (B,N) -> (B,N), never negative."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def last_valid(tokens: Tensor, mask: Tensor | None, slots: int) -> Tensor:
    """Return the last ``slots`` real tokens of each row.

    Args:
        tokens: (B,slots+N,...): tokens of earlier calls, then the new ones, real tokens first.
        mask: (B,N) bool, the real tokens among the new ones, or None.
        slots: The number of tokens to keep.

    Returns:
        (B,slots,...), which shares no memory with ``tokens``.
    """
    n = tokens.shape[1] - slots
    if mask is None:
        return tokens[:, n:].clone()
    return pick(tokens, mask.sum(1, keepdim=True) + torch.arange(slots, device=tokens.device))


def pick(x: Tensor, tokens: Tensor, axis: int = 1) -> Tensor:
    """Gather tokens (B,M) by number, row by row: x (B,...,N,...) with N at ``axis`` -> (B,...,M,...)."""
    rows, count = tokens.shape
    places = tokens.view(rows, *(1,) * (axis - 1), count, *(1,) * (x.dim() - axis - 1))
    return x.gather(axis, places.expand(*x.shape[:axis], -1, *x.shape[axis + 1 :]))


def spread(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """Return an attention matrix (B|1,H,N,S+N) over gathered tokens in the order of the call.

    Columns of masked tokens are 0. The S columns of earlier calls come first and stay in place.
    """
    if mask is None:
        return matrix
    (batch, n), old, at = mask.shape, matrix.shape[-1] - mask.shape[1], rank(mask)
    matrix = matrix.expand(batch, -1, -1, -1)
    columns = torch.cat([torch.arange(old, device=at.device).expand(batch, -1), old + at], 1)
    matrix = matrix.gather(2, at[:, None, :, None].expand(-1, matrix.shape[1], -1, old + n))
    matrix = matrix.gather(3, columns[:, None, None].expand(-1, *matrix.shape[1:3], -1))
    kept = torch.nn.functional.pad(mask, (old, 0), value=True)
    return matrix.masked_fill(~kept[:, None, None], 0)


def cut(
    run: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    like: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    *,
    exact: bool,
) -> Tensor:
    """Call ``run(number, *rows)`` on the real tokens of each sequence, once per length; equal to separate calls.

    Args:
        run: Gets the numbers (S,) int64 of S sequences, counted row by row, and their tokens (S,L,...), padded with
            zeros at the end. Causality must hide the padding. It returns (S,L,...).
        tensors: (B,N,...) each.
        like: (B,N,...), the shape and dtype of the result.
        mask: (B,N) bool, True = a real token.
        segments: (B,N) int64, packed sequences.
        exact: Groups only sequences of equal length, so that there is no padding.

    Returns:
        A tensor like ``like``, 0 at masked tokens.
    """
    batch, n = like.shape[:2]
    real = torch.ones(batch, n, dtype=torch.bool, device=like.device) if mask is None else mask
    token = real.flatten().nonzero()[:, 0]  # (T,) real tokens, row by row
    border = torch.ones_like(token, dtype=torch.bool)
    border[1:] = token[1:] // n != token[:-1] // n
    if segments is not None:
        ids = segments.flatten()[token]
        border[1:] |= ids[1:] != ids[:-1]
    starts = border.nonzero()[:, 0]
    sizes = torch.diff(starts, append=starts.new_tensor([len(token)]))
    room = sizes if exact else 2 ** (sizes - 1).clamp(min=0).double().add(1).log2().ceil().long()
    flat = [x.flatten(0, 1)[token] for x in tensors]  # (T,...)
    out = like.new_zeros(batch * n, *like.shape[2:])
    if not len(token):
        # A batch that is all padding also needs a gradient, of zeros.
        out = out + sum(x[:0].sum() for x in tensors)
    for length in room.unique().tolist():
        number = (room == length).nonzero()[:, 0]
        within = torch.arange(length, device=like.device)
        place = starts[number, None] + within  # (S,L)
        there = within < sizes[number, None]
        # Zeros after the end, not the tokens of the next sequence: causality does not hide NaN or infinity.
        beyond = ~there
        rows = [x[place.clamp(max=len(token) - 1)] for x in flat]
        rows = [x.masked_fill(beyond.view(*beyond.shape, *(1,) * (x.dim() - 2)), 0.0) for x in rows]
        out = out.index_put((token[place[there]],), run(number, *rows)[there].to(out.dtype))
    return out.unflatten(0, (batch, n))


def ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    mask: Tensor | None,
    segments: Tensor | None,
    *,
    exact: bool,
) -> Tensor:
    """``cut`` for heads: q, k, v (B,H,N,.) -> (B,H,N,E), 0 at masked tokens."""

    def heads(number: Tensor, *rows: Tensor) -> Tensor:
        return run(*(x.transpose(1, 2) for x in rows)).transpose(1, 2)

    tokens = [x.transpose(1, 2) for x in (q, k, v)]
    like = tokens[2][:, :, :1].expand(-1, -1, q.shape[1], -1)
    return cut(heads, tokens, like, mask, segments, exact=exact).transpose(1, 2)


def split_packed(run: Run, x: Tensor, state: Any, mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Any]:
    """Call ``run(x, state, real)`` with each packed sequence as a separate row that begins with its real tokens.

    Args:
        run: Gets the rows, their states, and a bool mask of their real tokens, which is None if all are real.
        x: (B,N,.).
        state: The state of each row's first sequence. The other sequences start from zeros.
        mask: (B,N) bool, True = a real token.
        segments: (B,N) int64, packed sequences.

    Returns:
        The outputs (B,N,.) in the order of x, 0 at masked tokens, and the states of each row's last sequence.
    """
    if segments is None or not x.numel():
        return _in_front(run, x, state, mask)
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
    y, after = _in_front(run, alone, None if state is None else pytree.tree_map(first, state), real)
    return y[row, place], None if state is None else pytree.tree_map(lambda part: part[row[:, -1]], after)


def _in_front(run: Run, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
    """``split_packed`` for rows with one sequence each."""
    if mask is None:
        return run(x, state, None)
    real = torch.arange(x.shape[1], device=x.device) < mask.sum(1, keepdim=True)
    y, state = run(gather_valid(mask, x)[0], state, real)
    return scatter_back(mask, y).masked_fill(~mask[..., None], 0.0), state


def map_sequences(
    run: Run, x: Tensor, state: Any, mask: Tensor | None, segments: Tensor | None, *, causal: bool, width: int
) -> tuple[Tensor, Any]:
    """Call ``run(x, state, real)`` for every sequence: x (B,N,.), mask, segments (B,N) -> outputs (B,N,width), state.

    Without a state, sequences of equal length (``causal``: of similar length) share a call with ``real`` None, so
    memory grows with the real tokens only. With a state, and in traced graphs, this is ``split_packed``. Outputs of
    masked tokens are 0.
    """
    if not x.numel() or (mask is None and segments is None):
        return run(x, state, None)
    if state is not None or followed():
        return split_packed(run, x, state, mask, segments)

    def clean(_: Tensor, x: Tensor) -> Tensor:
        return run(x, None, None)[0]

    return cut(clean, (x,), x[..., :width], mask, segments, exact=not causal), None
