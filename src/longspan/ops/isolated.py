"""Packed sequences whose NaN and infinity do not reach the other sequences of their row, for every backend.

A weight or a mask of 0 does not stop NaN or infinity, since 0 * inf is NaN. But if all results of a row are finite,
nothing has crossed from one sequence into another. So the packed form runs first. If a result is not finite, each
sequence runs separately. Gradients are treated in the same way. Both ways compute the same values; for finite rows the
cost is one check of the results.

A compiler, a transform of ``torch.func`` and the capture of a CUDA graph cannot branch on values. There, tokens that
are not finite, and the tokens of their sequence that see them, are replaced by zeros, and their results are NaN. This
stops NaN and infinity in the inputs, but not an overflow of finite numbers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from .operands import followed, in_memory
from .segments import numbered
from .shards import active_shards


class Part(NamedTuple):
    """One packed sequence: tokens ``start`` to ``stop`` of a row, and whether it is the ``first`` or ``last`` of it."""

    row: int
    start: int
    stop: int
    first: bool
    last: bool

    def cut(self, x: Any, axis: int = 1) -> Any:
        """Return its tokens of x (B,...,N,...) as a batch of one row; None for None."""
        if x is None:
            return None
        return x[self.row : self.row + 1].narrow(axis, self.start, self.stop - self.start)

    def rows(self, state: Any) -> Any:
        """Return its row of a state as a batch of one."""
        return pytree.tree_map(lambda t: t[self.row : self.row + 1] if isinstance(t, Tensor) else t, state)


# (tokens, state, carry, the sequence or None for all packed rows) -> outputs, state, further results
Run = Callable[[Sequence[Any], Any, Any, Part | None], tuple[Any, ...]]


class Packed(NamedTuple):
    """How to compute a call on packed rows, and each of its sequences separately."""

    run: Run
    segments: Tensor  # (B,N) int64, equal ids are adjacent
    axis: int  # of tokens, in what ``run`` takes and in its outputs
    fresh: Callable[[], Any] = lambda: None  # the state of one row before the first token
    join: Callable[[list[Part], list[Any]], Any] | None = None  # the carries of sequences -> that of the packed call
    total: bool = False  # the state is the sum over all sequences of a row, not that of the last one
    causal: bool = True  # no token sees later ones


def isolated(
    packed: Packed,
    tokens: Sequence[Tensor | None],
    state: Any = None,
    carry: Any = None,
    *,
    examined: Sequence[Tensor | None] | None = None,
    gradients: bool = True,
) -> tuple[Any, ...]:
    """Call ``packed.run`` such that no sequence changes the outputs, states or gradients of another.

    Args:
        packed: How to compute the call, packed and by sequence.
        tokens: Tensors (B,...,N,...) or None.
        state: The state before the call.
        carry: Passed on to ``packed.run``.
        examined: The tensors whose NaN and infinity must be stopped; None for ``tokens``.
        gradients: False leaves the gradients as the packed form computes them.

    Returns:
        The results of ``packed.run``.
    """
    if 0 in packed.segments.shape or active_shards() is not None:
        # Which sequences are finite differs between processes, which must make the same calls.
        return packed.run(tokens, state, carry, None)
    if followed() or not _readable(packed.segments):
        return _hidden(packed, tokens, state, carry, tokens if examined is None else examined)
    given, tree = pytree.tree_flatten((tuple(tokens), state, carry))
    places = [i for i, t in enumerate(given) if _follows(t)] if gradients and torch.is_grad_enabled() else []
    upstream: dict[int, Tensor] = {}
    inputs = list(given)
    if places:
        views: Any = _Enter.apply(packed, upstream, given, tree, places, *(given[i] for i in places))
        for i, view in zip(places, views, strict=True):
            inputs[i] = view
    own_tokens, own_state, own_carry = pytree.tree_unflatten(inputs, tree)
    found = packed.run(own_tokens, own_state, own_carry, None)
    if not finite(found[:1], found[1]):
        return _alone(packed, *pytree.tree_unflatten(given, tree))
    if not places:
        return found
    outputs, tree = pytree.tree_flatten(found)
    for i, t in enumerate(outputs):
        if _follows(t):
            # A view, since the call itself may read what it returns. A hook, since outputs of an autograd function
            # cannot be changed in place.
            outputs[i] = t.view_as(t)
            outputs[i].register_hook(partial(_keep, upstream, i))
    return pytree.tree_unflatten(outputs, tree)


def _keep(upstream: dict[int, Tensor], number: int, grad: Tensor) -> None:
    upstream[number] = grad


def finite(results: Sequence[Tensor | None], state: Any = None) -> bool:
    """Return whether no result is NaN or infinite. A state may hold -inf, the maximum of no numbers.

    One pass and one value fetched from the device; more if a sum is not finite.
    """
    results, kept = _numbers(results), _numbers(pytree.tree_leaves(state))
    if not results and not kept:
        return True
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)).float() for t in (*results, *kept)]
    if torch.stack(sums).isfinite().all():
        return True
    return all(t.isfinite().all() for t in results) and all((t < torch.inf).all() for t in kept)


def _numbers(tensors: Sequence[Any]) -> list[Tensor]:
    return [t.detach() for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]


def _follows(t: Any) -> bool:
    return isinstance(t, Tensor) and t.requires_grad


def _readable(segments: Tensor) -> bool:
    """Return whether values can be read: not those of fake tensors, nor while a CUDA graph is captured."""
    return in_memory(segments) and not (segments.is_cuda and torch.cuda.is_current_stream_capturing())


def _parts(segments: Tensor) -> list[Part]:
    """Return the packed sequences, row by row."""
    found, n = [], segments.shape[1]
    for row, ids in enumerate(numbered(segments).tolist()):
        starts = [i for i in range(n) if i == 0 or ids[i] != ids[i - 1]]
        for i, (start, stop) in enumerate(zip(starts, [*starts[1:], n], strict=True)):
            found.append(Part(row, start, stop, i == 0, i == len(starts) - 1))
    return found


def _alone(packed: Packed, tokens: Sequence[Any], state: Any, carry: Any) -> tuple[Any, ...]:
    """Compute ``packed.run`` sequence by sequence."""
    parts, results = _parts(packed.segments), []
    for part in parts:
        own = [part.cut(t, packed.axis) for t in tokens]
        before = None if state is None else part.rows(state) if part.first else packed.fresh()
        results.append(packed.run(own, before, carry, part))
    rows: list[list[Tensor]] = [[] for _ in range(len(packed.segments))]
    for part, result in zip(parts, results, strict=True):
        rows[part.row].append(result[0])
    y = torch.cat([torch.cat(row, packed.axis) for row in rows])
    if packed.total:
        ends: list[Any] = [None] * len(rows)
        for part, result in zip(parts, results, strict=True):
            ends[part.row] = result[1] if part.first else ends[part.row] + result[1]
    else:
        ends = [result[1] for part, result in zip(parts, results, strict=True) if part.last]
    after = None if ends[0] is None else pytree.tree_map(_stacked, *ends)
    if len(results[0]) == 2:
        return y, after
    assert packed.join is not None
    return y, after, packed.join(parts, [result[2] for result in results])


def _stacked(*rows: Any) -> Any:
    """Concatenate rows of a state; parts that grow with the tokens are padded with zeros."""
    if not isinstance(rows[0], Tensor):
        return rows[0]
    sizes = [max(sizes) for sizes in zip(*(t.shape[1:] for t in rows), strict=True)]
    padded = []
    for t in rows:
        more = [room for size, most in zip(t.shape[:0:-1], sizes[::-1], strict=True) for room in (0, most - size)]
        padded.append(F.pad(t, more) if any(more) else t)
    return torch.cat(padded)


class _Enter(torch.autograd.Function):
    """Identity on the inputs of a call; if a gradient is not finite, the backward pass runs each sequence separately.

    ``upstream``: the gradients of the outputs by number, filled in before this backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: Packed,
        upstream: dict[int, Tensor],
        given: list[Any],
        tree: pytree.TreeSpec,
        places: list[int],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        kind = packed.segments.device.type
        ctx.packed, ctx.upstream, ctx.tree, ctx.places = packed, upstream, tree, places
        ctx.cast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.tensors = [i for i, t in enumerate(given) if isinstance(t, Tensor)]
        ctx.others = [None if isinstance(t, Tensor) else t for t in given]
        # Saved through autograd, so that checkpointing can drop them.
        ctx.save_for_backward(*(given[i] for i in ctx.tensors))
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        upstream = dict(ctx.upstream)
        ctx.upstream.clear()
        if not upstream or finite(grads):
            return *(None,) * 5, *grads
        again, given = torch.is_grad_enabled(), list(ctx.others)
        for i, t in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            given[i] = t.view_as(t) if again else t.detach().requires_grad_(i in ctx.places)
        kind, dtype, cast = ctx.cast
        with torch.enable_grad(), torch.autocast(kind, dtype, cast):
            found = _alone(ctx.packed, *pytree.tree_unflatten(given, ctx.tree))
        outputs = pytree.tree_leaves(found)
        pairs = [(outputs[i], _fitted(g, outputs[i])) for i, g in upstream.items() if _follows(outputs[i])]
        outputs, passed = zip(*pairs, strict=True)
        inputs = [given[i] for i in ctx.places]
        found = torch.autograd.grad(outputs, inputs, passed, create_graph=again, allow_unused=True)
        return *(None,) * 5, *found


def _fitted(grad: Tensor, like: Tensor) -> Tensor:
    """Pad or crop a gradient to the size of an output: a cache can have a different number of empty slots."""
    sizes = zip(like.shape[::-1], grad.shape[::-1], strict=True)
    return F.pad(grad, [edge for wanted, size in sizes for edge in (0, wanted - size)]).to(like.dtype)


def _hidden(
    packed: Packed, tokens: Sequence[Any], state: Any, carry: Any, examined: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """The form without branches: tokens that see NaN or infinity give NaN, and no other token sees them."""
    spoilt = torch.zeros_like(packed.segments, dtype=torch.bool)
    for t in examined:
        if t is not None:
            tokenwise = t.movedim(packed.axis, 1).flatten(2) if t.dim() > 2 else t[..., None]
            spoilt = spoilt | ~tokenwise.isfinite().all(-1)
    spoilt = _seen(spoilt, packed.segments, packed.causal)

    def along(t: Tensor) -> Tensor:
        """Reshape ``spoilt`` for a tensor (B,...,N,...)."""
        return spoilt.view(len(spoilt), *(1,) * (packed.axis - 1), -1, *(1,) * (t.dim() - packed.axis - 1))

    kept = [t if t is None else t.masked_fill(along(t), 0.0) for t in tokens]
    y, after, *rest = packed.run(kept, state, carry, None)
    ending = spoilt.any(1) if packed.total else spoilt[:, -1]

    def ended(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        return t.masked_fill(ending.view(-1, *(1,) * (t.dim() - 1)), torch.nan)

    return y.masked_fill(along(y), torch.nan), pytree.tree_map(ended, after), *rest


def _seen(spoilt: Tensor, segments: Tensor, causal: bool) -> Tensor:
    """Return which tokens (B,N) see a spoilt one: later ones of its sequence, or all of it."""
    border = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    count = spoilt.long().cumsum(1)
    before = torch.where(border, count - spoilt.long(), 0).cummax(1).values
    if causal:
        return count > before
    number = numbered(segments)
    return torch.zeros_like(count).scatter_add(1, number, spoilt.long()).gather(1, number) > 0
