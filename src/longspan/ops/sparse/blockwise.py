"""Block-sparse softmax attention under a pattern, without an N x N matrix."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import patterns
from ..backends import log_backend, mark_dynamo_constant, resolve_backend
from ..custom_ops import operation
from ..native.call import available
from ..softmax.dense import repeat
from . import definition, flex, tiles
from . import native as kernels
from .schedule import Classes, listed, placed, plan

OP, SERVED = "attention under a pattern", ("reference", "torch", "native", "flex")


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: patterns.Pattern | str, *, layer: int, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that the pattern allows, in O(N keys-per-query) time and memory of the size of the inputs.

    The torch backend also copies keys that are not in runs of neighboring blocks, a part at a time. The torch and flex
    backends pad queries to M.

    Args:
        q: (B,H,N,D) queries at the last N of M positions.
        k: (B,G,M,D) keys at positions 0 ... M - 1; G divides H.
        v: (B,G,M,E) values.
        pattern: The pattern or its spec.
        layer: Number of the layer, for patterns that differ by layer.
        scale: Factor of the logits.
        softcap: Cap of the logits, see ``sparse_attention``; 0: none.

    Returns:
        The output (B,H,N,E) and the log-sum-exp of each row (B,H,N), in float32 or float64 and without a gradient. A
        row that sees no key gets 0 and -inf.
    """
    if not q.numel() or not v.numel():
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum()), _empty_lse(q).fill_(
            -torch.inf
        )
    text = pattern if isinstance(pattern, str) else _spec(pattern)
    backend, no_kernels = _select(q, k, v, text, layer, softcap)
    if backend != "native":
        log_backend(OP, backend, no_kernels)
    before = _num_padding(q, k, text, layer, backend)
    if before:
        q = F.pad(q, (0, 0, before, 0))
    if backend == "flex":
        out, lse = flex.attend(q, k, v, text, layer, scale)
    else:
        out, lse = _attend(Blocks(q, k, v, text, layer, scale, softcap, backend == "native"))
    return (out[:, :, before:], lse[:, :, before:].detach()) if before else (out, lse.detach())


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: patterns.Pattern,
    *,
    mask: Tensor | None,
    segments: Tensor | None,
    layer: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor | None:
    """Attend in padded and packed rows in one call, without waiting for the device; None if no backend can.

    Args:
        q: (B,H,N,D) queries.
        k: (B,G,N,D) keys.
        v: (B,G,N,E) values.
        pattern: The pattern of each sequence.
        mask: (B,N) bool, True on real tokens, or None.
        segments: (B,N) int64, packed sequences, or None.
        layer: Number of the layer, for patterns that differ by layer.
        scale: Factor of the logits.
        softcap: Cap of the logits; 0: none.
    """
    text = _spec(pattern)
    backend, no_kernels = _select(q, k, v, text, layer, softcap)
    if backend != "flex":
        return None
    log_backend(OP, backend, no_kernels)
    return flex.attend(q, k, v, text, layer, scale, mask, segments)[0]


def _num_padding(q: Tensor, k: Tensor, text: str, layer: int, backend: str) -> int:
    """Number of padding queries before the real ones: 0 if the C++ kernels compute all blocks."""
    before = k.shape[2] - q.shape[2]
    return 0 if before and backend == "native" and not _classes(q.shape[1], k.shape[2], text, layer) else before


@mark_dynamo_constant
def _classes(heads: int, tokens: int, text: str, layer: int) -> bool:
    """Whether a head has residue classes of tokens besides its blocks."""
    alike = not patterns.parse(text).per_head
    return any(plan(text, tokens, head, layer, True)[1] for head in range(1 if alike else heads))


def _select(q: Tensor, k: Tensor, v: Tensor, text: str, layer: int, softcap: float) -> tuple[str, str]:
    """Select the backend of a call; return it, and why the C++ kernels cannot run it, or "".

    Raises ValueError if a requested backend cannot run the call.
    """
    no_kernels = kernels.why_not(q, k, v)
    no_flex = "scores are capped" if softcap else flex.why_not(q, k, v, text, layer)
    best = "torch" if no_kernels and no_flex else "flex" if no_kernels else "native"
    backend = resolve_backend(OP, SERVED, best)
    for name, reason in (("native", no_kernels), ("flex", no_flex)):
        if backend == name and reason:
            raise ValueError(f"backend {name!r} cannot serve this call of {OP}: {reason}")
    return backend, no_kernels


@mark_dynamo_constant
def _spec(pattern: patterns.Pattern) -> str:
    return repr(pattern)


def flops(q: torch.Size, k: torch.Size, v: torch.Size, pattern: str, layer: int, *_: object, **__: object) -> int:
    """FLOPs of the matrix products of ``longspan::pattern_forward`` over whole blocks, from the operands' shapes."""
    pairs, n, heads = 0, q[2], q[1]
    alike = not patterns.parse(pattern).per_head
    for head in [0] if alike else range(heads):
        for part in plan(pattern, n, head, layer, True)[1]:
            assert isinstance(part, Classes)
            pairs += part.apart * part.count**2
        blocks = listed(pattern, n, head, layer)
        pairs += 0 if blocks is None else len(blocks.keys) * blocks.size**2
    return 2 * (q[3] + v[3]) * q[0] * pairs * (heads if alike else 1)


class Blocks(NamedTuple):
    """Operands of ``attend``."""

    q: Tensor  # (B,H,N,D); N < M only if the C++ kernels compute all blocks
    k: Tensor  # (B,G,M,D)
    v: Tensor  # (B,G,M,E)
    pattern: str
    layer: int
    scale: float
    softcap: float
    by_kernels: bool  # use the C++ kernels


def _forward(r: Blocks) -> tuple[Tensor, Tensor]:
    """Return output (B,H,N,E) and log-sum-exp (B,H,N)."""
    q, k, v, pattern, layer, scale, softcap, by_kernels = r
    (out, lse), n = _empty_outputs(r), k.shape[2]
    for own, head, q_, k_, v_ in _heads(q, k, v, pattern):
        length, parts = placed(pattern, n, head, layer, by_kernels, q.device)
        blocks = listed(pattern, n, head, layer) if by_kernels else None
        if blocks is not None:
            log_backend(OP, "native")
            sums = lse if q_ is q else _empty_lse(q_)
            kernels.forward(q_, k_, v_, out[:, own], sums, blocks, scale, softcap)
            if sums is not lse:
                lse[:, own] = sums
        if parts or blocks is None:
            if by_kernels:
                log_backend(OP, "torch", "periodic parts, which are dense after sorting, run as matrix products")
            rows, wide = _rows(length, q_, k_, v_)
            o, log = torch.zeros_like(rows[0]), _empty_lse(rows[0][None])[0].fill_(-torch.inf)
            if blocks is not None:
                o = tiles.padded(F.pad(out[:, own], (0, wide - v.shape[-1])), length)
                log = F.pad(lse[:, own].flatten(0, 1), (0, length - n), value=-torch.inf)
            tiles.forward(parts, rows, o, log, scale, softcap, begun=blocks is not None)
            out[:, own] = _unpadded(o, q_, v.shape[-1])
            lse[:, own] = _unpadded(log[..., None], q_, 1)[..., 0]
    return out, lse


def _backward(r: Blocks, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    q, k, v, pattern, layer, scale, softcap, by_kernels = r
    n, grads = k.shape[2], None
    for own, head, q_, k_, v_ in _heads(q, k, v, pattern):
        length, parts = placed(pattern, n, head, layer, by_kernels, q.device)
        blocks = listed(pattern, n, head, layer) if by_kernels else None
        group = head // (q.shape[1] // k.shape[1])
        shared = own if q_ is q else slice(group, group + 1)
        if blocks is not None:
            of = out[:, own], grad[:, own], lse[:, own].contiguous()
            *found, _ = kernels.backward(q_, k_, v_, *of, blocks, scale, softcap)
            if q_ is q and not parts:
                return found[0], found[1], found[2]
            grads = grads or _zero_grads(q, k, v)
            for total, add, place in zip(grads, found, (own, shared, shared), strict=True):
                total[:, place] += add
        if parts or blocks is None:
            grads = grads or _zero_grads(q, k, v)
            rows, wide = _rows(length, q_, k_, v_)
            rows += [tiles.padded(F.pad(x[:, own], (0, wide - v.shape[-1])), length) for x in (grad, out)]
            # For rows that see no key, exp(logit - inf) = 0; with -inf, logit + inf could be NaN.
            log = F.pad(lse[:, own].flatten(0, 1), (0, length - n), value=torch.inf)
            found = [torch.zeros_like(x) for x in rows[:3]]
            tiles.backward(parts, rows, log.masked_fill(log == -torch.inf, torch.inf), found, scale, softcap)
            for total, add, place in zip(grads, found, (own, shared, shared), strict=True):
                whole = _unpadded(add, q_, total.shape[-1])
                groups = total[:, place].shape[1]
                total[:, place] += whole.unflatten(1, (groups, -1)).sum(2)
    return grads or _zero_grads(q, k, v)


def _zero_grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    zeros = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return next(zeros), next(zeros), next(zeros)


def _heads(q: Tensor, k: Tensor, v: Tensor, pattern: str) -> Iterator[tuple[slice, int, Tensor, Tensor, Tensor]]:
    """Yield (heads, first head, q, k, v): all heads together, or one at a time if their patterns differ."""
    if not patterns.parse(pattern).per_head:
        yield slice(None), 0, q, k, v
        return
    shared = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        own, group = slice(head, head + 1), slice(head // shared, head // shared + 1)
        yield own, head, q[:, own], k[:, group], v[:, group]


def _rows(length: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], int]:
    """q, k, v as (B H, length, D) with equal numbers of heads and channels, and that number of channels."""
    wide = max(q.shape[-1], v.shape[-1])
    each = (q, repeat(k, q.shape[1]), repeat(v, q.shape[1]))
    return [tiles.padded(F.pad(x, (0, wide - x.shape[-1])), length) for x in each], wide


def _unpadded(x: Tensor, q: Tensor, width: int) -> Tensor:
    return x.unflatten(0, q.shape[:2])[:, :, : q.shape[2], :width]


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _empty_outputs(r: Blocks) -> tuple[Tensor, Tensor]:
    return r.v.new_empty(*r.q.shape[:3], r.v.shape[-1]), _empty_lse(r.q)


def _plain(r: Blocks) -> tuple[Tensor, Tensor]:
    """The same by operations with derivatives of any order; the log-sum-exps have none."""
    pattern, how = patterns.parse(r.pattern), {"scale": r.scale, "softcap": r.softcap}
    out, _, lse = definition.attend(r.q, r.k, r.v, pattern, layer=r.layer, **how)
    return out, lse.detach()


_attend = operation(
    "pattern",
    Blocks,
    _forward,
    shapes=_empty_outputs,
    again=_plain,
    inputs=3,
    backward=_backward,
    ready=lambda r: not r.by_kernels or available("pattern/backward"),
)


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
    """Return the gradients of q, k, v from that of the output; ``out`` and ``lse`` are the results of ``attend``."""
    text = _spec(pattern)
    backend = _select(q, k, v, text, layer, softcap)[0]
    before = _num_padding(q, k, text, layer, backend)
    if before:
        grad, q, out = (F.pad(x, (0, 0, before, 0)) for x in (grad, q, out))
        lse = F.pad(lse, (before, 0), value=-torch.inf)
    assert _attend.backward is not None
    r = Blocks(q, k, v, text, layer, scale, softcap, backend == "native")
    dq, dk, dv = _attend.backward(grad, *r, out, lse)
    return dq[:, :, before:], dk, dv
