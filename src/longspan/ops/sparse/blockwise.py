"""Softmax attention over the pairs of a pattern, block by block; never an N x N matrix."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import patterns
from ..backends import log_backend, mark_dynamo_constant, resolve_backend
from ..operands import double_backward
from ..softmax.dense import repeat
from . import definition, flex, tiles
from . import native as kernels
from .schedule import Classes, listed, plan

OP, SERVED = "attention under a pattern", ("reference", "torch", "native", "flex")


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: patterns.Pattern | str, *, layer: int, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """softmax over the keys that the pattern allows: q (B,H,N,D), k (B,G,M,D), v (B,G,M,E), G dividing H, -> (B,H,N,E),
    log-sums (B,H,N), float32 at least.

    Keys stand at positions 0 ... M-1, queries at the last N of them. A row that sees nothing gives 0 and -inf. The
    log-sums carry no gradient. ``softcap``: see ``sparse_attention``; 0 is none. O(N keys-per-query) time; memory of
    the inputs' size, and of the torch form also that of keys that are no runs of neighboring blocks, a part at a time.
    The torch form and flex compute M queries where there are fewer.
    """
    if not q.numel() or not v.numel():
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum()), _sums(q).fill_(-torch.inf)
    text = pattern if isinstance(pattern, str) else _text(pattern)
    way, no_kernels = _way(q, k, v, text, layer, softcap)
    if way != "native":
        log_backend(OP, way, no_kernels)
    before = _before(q, k, text, layer, way)
    if before:
        q = F.pad(q, (0, 0, before, 0))
    if way == "flex":
        out, lse = flex.attend(q, k, v, text, layer, scale)
    else:
        out, lse = _forward_op(q, k, v, text, layer, scale, softcap, way == "native")
    return (out[:, :, before:], lse[:, :, before:].detach()) if before else (out, lse.detach())


def _before(q: Tensor, k: Tensor, text: str, layer: int, way: str) -> int:
    """How many queries are made up before those that there are: none where the kernels serve all."""
    before = k.shape[2] - q.shape[2]
    return 0 if before and way == "native" and not _classes(q.shape[1], k.shape[2], text, layer) else before


@mark_dynamo_constant
def _classes(heads: int, tokens: int, text: str, layer: int) -> bool:
    """Whether a head has classes of tokens beside its blocks."""
    alike = not patterns.parse(text).per_head
    return any(plan(text, tokens, head, layer, True)[1] for head in range(1 if alike else heads))


def _way(q: Tensor, k: Tensor, v: Tensor, text: str, layer: int, softcap: float) -> tuple[str, str]:
    """The backend of a call, and why it cannot be the C++ kernels.

    Raises ValueError where a forced one cannot serve it.
    """
    no_kernels = kernels.why_not(q, k, v)
    no_flex = "scores are capped" if softcap else flex.why_not(q, k, v, text, layer)
    best = "torch" if no_kernels and no_flex else "flex" if no_kernels else "native"
    way = resolve_backend(OP, SERVED, best)
    for name, reason in (("native", no_kernels), ("flex", no_flex)):
        if way == name and reason:
            raise ValueError(f"backend {name!r} cannot serve this call of {OP}: {reason}")
    return way, no_kernels


@mark_dynamo_constant
def _text(pattern: patterns.Pattern) -> str:
    return repr(pattern)


def flops(q: torch.Size, k: torch.Size, v: torch.Size, pattern: str, layer: int, *_: object, **__: object) -> int:
    """FLOPs of the products of ``longspan::pattern_forward``, by the shapes of its operands: of whole blocks."""
    pairs, n, heads = 0, q[2], q[1]
    alike = not patterns.parse(pattern).per_head
    for head in [0] if alike else range(heads):
        for part in plan(pattern, n, head, layer, True)[1]:
            assert isinstance(part, Classes)
            pairs += part.apart * part.count**2
        blocks = listed(pattern, n, head, layer)
        pairs += 0 if blocks is None else len(blocks.keys) * blocks.size**2
    return 2 * (q[3] + v[3]) * q[0] * pairs * (heads if alike else 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: str, layer: int, scale: float, softcap: float, by_kernels: bool
) -> tuple[Tensor, Tensor]:
    """-> output (B,H,N,E), log of each row's sum (B,H,N); fewer queries than keys where the kernels serve all."""
    out, lse, n = _room(q, v), _sums(q), k.shape[2]
    for own, head, q_, k_, v_ in _heads(q, k, v, pattern):
        length, parts = plan(pattern, n, head, layer, by_kernels)
        blocks = listed(pattern, n, head, layer) if by_kernels else None
        if blocks is not None:
            log_backend(OP, "native")
            sums = lse if q_ is q else _sums(q_)
            kernels.forward(q_, k_, v_, out[:, own], sums, blocks, scale, softcap)
            if sums is not lse:
                lse[:, own] = sums
        if parts or blocks is None:
            if by_kernels:
                log_backend(
                    OP, "torch", "they leave what is periodic, which is dense after sorting, to products of matrices"
                )
            rows, wide = _rows(length, q_, k_, v_)
            o, log = torch.zeros_like(rows[0]), _sums(rows[0][None])[0].fill_(-torch.inf)
            if blocks is not None:
                o = tiles.padded(F.pad(out[:, own], (0, wide - v.shape[-1])), length)
                log = F.pad(lse[:, own].flatten(0, 1), (0, length - n), value=-torch.inf)
            tiles.forward(parts, rows, o, log, scale, softcap, begun=blocks is not None)
            out[:, own] = _unpadded(o, q_, v.shape[-1])
            lse[:, own] = _unpadded(log[..., None], q_, 1)[..., 0]
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: str,
    layer: int,
    scale: float,
    softcap: float,
    by_kernels: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    n, grads = k.shape[2], None
    for own, head, q_, k_, v_ in _heads(q, k, v, pattern):
        length, parts = plan(pattern, n, head, layer, by_kernels)
        blocks = listed(pattern, n, head, layer) if by_kernels else None
        group = head // (q.shape[1] // k.shape[1])
        shared = own if q_ is q else slice(group, group + 1)
        if blocks is not None:
            of = out[:, own], grad[:, own], lse[:, own].contiguous()
            found = kernels.backward(q_, k_, v_, *of, blocks, scale, softcap)
            if q_ is q and not parts:
                return found
            grads = grads or _nothing(q, k, v)
            for total, add, place in zip(grads, found, (own, shared, shared), strict=True):
                total[:, place] += add
        if parts or blocks is None:
            grads = grads or _nothing(q, k, v)
            rows, wide = _rows(length, q_, k_, v_)
            rows += [tiles.padded(F.pad(x[:, own], (0, wide - v.shape[-1])), length) for x in (grad, out)]
            # A row that sees nothing: exp(logit - inf) = 0, where logit + inf would be no number.
            log = F.pad(lse[:, own].flatten(0, 1), (0, length - n), value=torch.inf)
            found = [torch.zeros_like(x) for x in rows[:3]]
            tiles.backward(parts, rows, log.masked_fill(log == -torch.inf, torch.inf), found, scale, softcap)
            for total, add, place in zip(grads, found, (own, shared, shared), strict=True):
                whole = _unpadded(add, q_, total.shape[-1])
                groups = total[:, place].shape[1]
                total[:, place] += whole.unflatten(1, (groups, -1)).sum(2)
    return grads or _nothing(q, k, v)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    zeros = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return next(zeros), next(zeros), next(zeros)


def _heads(q: Tensor, k: Tensor, v: Tensor, pattern: str) -> Iterator[tuple[slice, int, Tensor, Tensor, Tensor]]:
    """(heads, number of the first, their q, k, v): all at once, or one after the other where their patterns differ."""
    if not patterns.parse(pattern).per_head:
        yield slice(None), 0, q, k, v
        return
    shared = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        own, group = slice(head, head + 1), slice(head // shared, head // shared + 1)
        yield own, head, q[:, own], k[:, group], v[:, group]


def _rows(length: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], int]:
    """q, k, v as (B H, length, D) with as many heads and channels each, and that number of channels."""
    wide = max(q.shape[-1], v.shape[-1])
    each = (q, repeat(k, q.shape[1]), repeat(v, q.shape[1]))
    return [tiles.padded(F.pad(x, (0, wide - x.shape[-1])), length) for x in each], wide


def _unpadded(x: Tensor, q: Tensor, width: int) -> Tensor:
    return x.unflatten(0, q.shape[:2])[:, :, : q.shape[2], :width]


def _room(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[-1])


def _sums(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


_forward_op = torch.library.custom_op("longspan::pattern_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::pattern_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, pattern: str, layer: int, scale: float, softcap: float, by_kernels: bool
) -> tuple[Tensor, Tensor]:
    return _room(q, v), _sums(q)


@_backward_op.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: str,
    layer: int,
    scale: float,
    softcap: float,
    by_kernels: bool,
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        q, k, v, *_ = ctx.saved_tensors
        return *double_backward(_plain, (q, k, v), (grad,), options=ctx.options), None, None, None, None, None
    return *_backward_op(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


def _plain(q: Tensor, k: Tensor, v: Tensor, *, options: tuple[Any, ...]) -> Tensor:
    pattern, layer, scale, softcap, _ = options
    return definition.attend(q, k, v, patterns.parse(pattern), layer=layer, scale=scale, softcap=softcap)[0]


_forward_op.register_autograd(_differentiate, setup_context=_save)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: patterns.Pattern,
    *,
    layer: int,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k, v from that of the output, with what ``attend`` has given."""
    text = _text(pattern)
    way = _way(q, k, v, text, layer, softcap)[0]
    before = _before(q, k, text, layer, way)
    if before:
        grad, q, out = (F.pad(x, (0, 0, before, 0)) for x in (grad, q, out))
        lse = F.pad(lse, (before, 0), value=-torch.inf)
    dq, dk, dv = _backward_op(grad, q, k, v, out, lse, text, layer, scale, softcap, way == "native")
    return dq[:, :, before:], dk, dv
