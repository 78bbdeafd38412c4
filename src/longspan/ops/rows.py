"""Padded and packed rows, made such that a mechanism meets real tokens of one sequence alone.

Two ways, and one function that chooses: ``ragged`` cuts sequences out and calls once for each length, so that nobody
meets padding; ``split_packed`` makes one call for all, on rows that begin with their real tokens, and continues states;
``map_sequences`` takes the former where it may. ``gather_valid`` and ``scatter_back`` move tokens within rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .operands import transformed

Run = Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Any]]


def gather_valid(mask: Tensor | None, *tensors: Tensor, axis: int = 1) -> tuple[Tensor, ...]:
    """Each (B,...,N,...) with the real tokens of a row first, in their order, and the others after them; mask (B,N)."""
    if mask is None:
        return tensors
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return tuple(pick(x, order, axis) for x in tensors)


def scatter_back(mask: Tensor | None, x: Tensor, axis: int = 1) -> Tensor:
    """x (B,...,N,...), in the order of ``gather_valid``, in that of the call; what masked tokens get means nothing."""
    return x if mask is None else pick(x, rank(mask), axis)


def rank(mask: Tensor) -> Tensor:
    """Where ``gather_valid`` has put each real token: mask (B,N) -> (B,N), never negative."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def last_valid(tokens: Tensor, mask: Tensor | None, slots: int) -> Tensor:
    """The last ``slots`` tokens of each row: tokens (B,slots+N,...), those of earlier calls before new ones together.

    -> (B,slots,...), which shares no memory with ``tokens``.
    """
    n = tokens.shape[1] - slots
    if mask is None:
        return tokens[:, n:].clone()
    return pick(tokens, mask.sum(1, keepdim=True) + torch.arange(slots, device=tokens.device))


def pick(x: Tensor, tokens: Tensor, axis: int = 1) -> Tensor:
    """Row by row the tokens of these numbers: x (B,...,N,...) with N at the axis, tokens (B,M) -> (B,...,M,...)."""
    rows, count = tokens.shape
    places = tokens.view(rows, *(1,) * (axis - 1), count, *(1,) * (x.dim() - axis - 1))
    return x.gather(axis, places.expand(*x.shape[:axis], -1, *x.shape[axis + 1 :]))


def spread(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """A matrix (B|1,H,N,S+N) of tokens together as one of the call's own order, 0 in the columns of masked tokens.

    S columns, those of earlier calls, come first and stay.
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
    """``run(number, *rows)`` on the real tokens of each row, or of each packed sequence: the same as separate calls.

    tensors (B,N,...) each, mask (B,N) bool, segments (B,N) int64 -> in shape and dtype of ``like`` (B,N,...), 0 at
    masked tokens. ``run`` gets sequences of about one length, (S,L,...) each, padded at the end, where causality has to
    hide the pad, and which they are, (S,) int64, counted row by row; it gives (S,L,...). ``exact``: those of the very
    same length alone.
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
    """``cut`` for heads: q, k, v (B,H,N,.), of which ``run`` gets some rows, -> (B,H,N,E), 0 at masked tokens."""

    def heads(number: Tensor, *rows: Tensor) -> Tensor:
        return run(*(x.transpose(1, 2) for x in rows)).transpose(1, 2)

    tokens = [x.transpose(1, 2) for x in (q, k, v)]
    like = tokens[2][:, :, :1].expand(-1, -1, q.shape[1], -1)
    return cut(heads, tokens, like, mask, segments, exact=exact).transpose(1, 2)


def split_packed(run: Run, x: Tensor, state: Any, mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Any]:
    """``run(x, state, real)`` with each packed sequence as a row of its own, which begins with its real tokens.

    x (B,N,.), mask (B,N) bool, segments (B,N) int64 -> what ``run`` gives, (B,N,.), each token's in its place and 0 at
    masked ones. ``real`` (B,N) tells the real tokens of the moved rows, None where all are. The first sequence of each
    row goes on with the state, others with one of zeros; what comes back are the states of the last ones.
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
    """``split_packed`` for rows of one sequence each."""
    if mask is None:
        return run(x, state, None)
    real = torch.arange(x.shape[1], device=x.device) < mask.sum(1, keepdim=True)
    y, state = run(gather_valid(mask, x)[0], state, real)
    return scatter_back(mask, y).masked_fill(~mask[..., None], 0.0), state


def map_sequences(
    run: Run, x: Tensor, state: Any, mask: Tensor | None, segments: Tensor | None, *, causal: bool, width: int
) -> tuple[Tensor, Any]:
    """``run(x, state, real)`` for every sequence: x (B,N,.), mask, segments (B,N) -> outputs (B,N,width), the state.

    Without a state, sequences of the same length (``causal``: of about the same) share a call with ``real`` None, so
    that memory is that of their tokens. With one, and where a graph is traced, rows begin with their real tokens, as in
    ``split_packed``. Outputs of masked tokens are 0 in either case.
    """
    if not x.numel() or (mask is None and segments is None):
        return run(x, state, None)
    if state is not None or torch.compiler.is_compiling() or transformed():
        return split_packed(run, x, state, mask, segments)

    def clean(_: Tensor, x: Tensor) -> Tensor:
        return run(x, None, None)[0]

    like = x[..., :width]
    y = cut(clean, (x,), like, mask, segments, exact=not causal)
    # A batch of padding alone has a gradient too, of zeros.
    return y + 0 * like, None
