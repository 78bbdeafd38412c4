"""Softmax attention under a pattern: the public function and the selection of a backend."""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import patterns
from ...patterns import Pattern
from ..arguments import check_mask
from ..backends import log_backend, resolve_backend
from ..operands import TRANSFORMED, check_scale, materialize_neg, same_device, transformed, zero_masked
from ..rows import ragged
from ..softmax import dense as softmax
from ..tensors import per_root, positions
from . import blockwise
from . import native as kernels
from .definition import scores, weighted
from .schedule import Tiles, plan


class Score(Protocol):
    """A bias of the logits, which may have learned parameters and depend on the queries."""

    def score(self, q_tile: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the bias of a tile of logits.

        Args:
            q_tile: (B,H,n,D) queries of all heads.
            i: (n,) positions of the queries.
            j: (m,) positions of the keys.

        Returns:
            A tensor that broadcasts to (B,H,n,m).
        """
        ...


Bias = Score | Tensor


class Logits(NamedTuple):
    """How queries and keys make logits."""

    scale: float
    bias: Bias | None = None
    layer: int = 0  # for patterns that differ by layer
    softcap: float = 0.0  # 0: none


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    *,
    mask: Tensor | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    r"""Softmax attention in which each query sees the keys that a pattern allows, in O(N keys-per-query).

    ``torch.compile`` accepts a spec as pattern only in calls without mask and bias, and a pattern value in all calls.
    Transforms of ``torch.func`` and forward-mode derivatives use plain PyTorch: one block at a time without a mask,
    O(N^2) with one.

    Args:
        query: (B,H,N,D) queries, the last N of M tokens. N = M with a mask or a bias.
        key: (B,G,M,D) keys; G divides H.
        value: (B,G,M,E) values.
        pattern: A pattern of ``longspan.patterns``, or its spec such as ``"band(255) | globals(4)"``.
        mask: (B,N) bool, True on real tokens; None: all are. Masked tokens are ignored completely: positions count only
            real tokens, and the output of masked tokens is 0.
        bias: Added to the logits: a tensor (H|1,N,N), or an object with a method ``score(q_tile, i, j)``.
        scale: Factor of $q_i \cdot k_j$; None: $1 / \sqrt D$.
        softcap: Replace each logit s by $c \tanh(s / c)$ with c = ``softcap``, before the bias. None: no cap.

    Returns:
        The output (B,H,N,E), 0 for a query that sees no key.

    Raises:
        ValueError: For shapes that do not fit each other, a mask that is not bool (B,N), an unknown pattern, and a
            softcap that is not positive.

    Example:
        >>> import torch, longspan
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8)  # (B,H,N,D) each
        >>> longspan.sparse_attention(q, k, v, "causal & (band(15) | globals(4))").shape
        torch.Size([1, 2, 100, 8])

    References:
        Gemma Team 2024 (2408.00118), section 2, for the softcap.
    """
    _check(query, key, value, mask, bias)
    check_scale(scale)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be positive and finite, or None for no cap")
    if isinstance(bias, Tensor):
        _check_bias(query, bias)
    # A compiler can trace a spec, but not the pattern that is parsed from it.
    if not torch.compiler.is_compiling() or mask is not None or bias is not None:
        pattern = patterns.parse(pattern)
    cap = softcap or 0.0
    return attend(query, key, value, cast(Pattern, pattern), mask=mask, bias=bias, scale=scale, softcap=cap)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    layer: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """``sparse_attention`` without its checks, also for packed sequences and layers.

    With fewer queries than keys, a mask or segments cover all M tokens, and queries are padded to M.

    Args:
        q: (B,H,N,D) queries.
        k: (B,G,M,D) keys.
        v: (B,G,M,E) values.
        pattern: The keys that each query sees.
        mask: (B,M) bool, True on real tokens; None: all are.
        segments: (B,M) int64, the sequence of each token in a packed row; None: one sequence.
        bias: Added to the logits.
        scale: Factor of the logits; None: 1 / sqrt(D).
        layer: Number of the layer, for patterns that differ by layer.
        softcap: Cap of the logits; 0: none.

    Returns:
        The output (B,H,N,E).
    """
    scale = per_root(q.shape[-1]) if scale is None else scale
    q, k, v = materialize_neg(q, k, v)
    if not q.shape[-1]:
        # With no channels all logits are 0, as with one channel of zeros, which every backend accepts.
        q, k = (torch.nn.functional.pad(t, (0, 1)) for t in (q, k))
    way, plain = resolve_backend(blockwise.OP, blockwise.SERVED, ""), transformed()
    if plain and way not in ("", "torch", "reference"):
        raise ValueError(f"backend {way!r} cannot serve this call of {blockwise.OP}: {TRANSFORMED}")
    reference, packed = way == "reference", mask is not None or segments is not None
    traced = torch.compiler.is_compiling()
    dense_form = (packed and (traced or plain)) or (traced and bias is not None and not reference)
    composed = reference or bias is not None or dense_form or plain
    if composed:
        k, v = softmax.repeat(k, q.shape[1]), softmax.repeat(v, q.shape[1])
    if not q.numel():
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * v.sum()
    before = k.shape[2] - q.shape[2] if composed or packed else 0
    if before:
        q = torch.nn.functional.pad(q, (0, 0, before, 0))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if reference:
            log_backend(blockwise.OP, "reference")
            return dense(q, k, v, pattern, how)[0]
        if bias is not None or plain:
            log_backend(blockwise.OP, "torch", "they do not support a bias" if bias is not None else TRANSFORMED)
            return _scored(q, k, v, pattern, how)
        return blockwise.attend(q, k, v, pattern, layer=layer, scale=scale, softcap=softcap)[0]

    table = isinstance(bias, Tensor) and (packed or dense_form)
    how = Logits(scale, _BiasTable(bias) if table and isinstance(bias, Tensor) else bias, layer, softcap)
    if dense_form:
        out = _masked(q, k, v, pattern, mask, segments, how)
    elif packed:
        found = None
        if not composed and way in ("", "flex"):
            found = blockwise.attend_packed(
                q, k, v, pattern, mask=mask, segments=segments, layer=layer, scale=scale, softcap=softcap
            )
        out = ragged(q, k, v, run, mask, segments, exact=pattern.lookahead != 0) if found is None else found
    else:
        out = run(q, k, v)
    return out[:, :, before:] if before else out


def unserved(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return why the C++ kernels cannot run these operands, or "" if they can."""
    return kernels.why_not(q, k, v)


def dense(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, how: Logits) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention by its definition: output (B,H,N,E), matrix (B,H,N,N), log-sum-exp of rows (B,H,N)."""
    n = q.shape[2]
    allowed = pattern.dense(n, heads=q.shape[1], layer=how.layer, device=q.device)
    at = torch.arange(n, device=q.device)
    return _softmax(q, k, v, allowed, at, at, how)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, i: Tensor, j: Tensor, how: Logits
) -> tuple[Tensor, Tensor, Tensor]:
    logits = scores(q, k, how.scale, how.softcap)
    if how.bias is not None:
        logits = logits + _score(how.bias, q, i, j)
    return weighted(logits, v, allowed)


def _score(bias: Bias, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return bias[:, i[:, None], j[None]] if isinstance(bias, Tensor) else bias.score(q, i, j)


class _BiasTable:
    """A bias tensor, indexed by positions."""

    def __init__(self, table: Tensor):
        self.table = table

    def score(self, q_tile: Tensor, i: Tensor, j: Tensor) -> Tensor:
        last = self.table.shape[-1] - 1
        return self.table[:, i.clamp(max=last)[:, None], j.clamp(max=last)[None]]


def _masked(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: Tensor | None, segments: Tensor | None, how: Logits
) -> Tensor:
    """``attend`` with one dense mask, O(N^2), for compilers, which cannot trace sizes that depend on the data."""
    at, _ = positions(q.transpose(1, 2), mask=mask, segments=segments)
    q, k, v = zero_masked(mask, q, k, v)
    allowed = allowed_at(pattern, at, at, q.shape[1], how.layer)
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    out = by_rows(q, k, v, allowed, at, at, how)
    return out if mask is None else out.masked_fill(~mask[:, None, :, None], 0.0)


def allowed_at(pattern: Pattern, i: Tensor, j: Tensor, heads: int, layer: int) -> Tensor:
    """Evaluate the pattern at positions i (B,N) and j (B,M): bool (B,H|1,N,M)."""
    i, j = i[:, :, None], j[:, None, :]
    if not pattern.per_head:
        return pattern.allow(i, j, layer=layer)[:, None]
    return torch.stack([pattern.allow(i, j, head=head, layer=layer) for head in range(heads)], 1)


def by_rows(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, i: Tensor, j: Tensor, how: Logits) -> Tensor:
    """Attend under a mask (B,H|1,N,M), with a bias at the positions i (B,N) and j (B,M) of each row."""
    if how.bias is None and not how.softcap:
        return softmax.attend(q * (how.scale * q.shape[-1] ** 0.5), k, v, mask=allowed)
    log_backend(blockwise.OP, "torch", "the mask is dense" if how.bias is None else "they do not support a bias")
    rows = [
        _softmax(q[b : b + 1], k[b : b + 1], v[b : b + 1], allowed[b : b + 1], i[b], j[b], how)[0]
        for b in range(len(q))
    ]
    return torch.cat(rows) if rows else q.new_zeros(*q.shape[:3], v.shape[-1])


def matrix(q: Tensor, k: Tensor, allowed: Tensor, i: Tensor, j: Tensor, how: Logits) -> tuple[Tensor, Tensor]:
    """Compute the attention matrix (B,H,N,M) of ``by_rows``, and the log-sum-exp of each row (B,H,N)."""
    rows = []
    for b in range(len(q)):
        one = slice(b, b + 1)
        rows.append(_softmax(q[one], k[one], k[one], allowed[one], i[b], j[b], how)[1:])
    return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])


def _scored(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, how: Logits) -> Tensor:
    """Attend with a bias, by autograd: one block of queries at a time, each recomputed in the backward pass."""
    # Transforms do not support recomputation.
    block = _block if transformed() else partial(checkpoint, _block, use_reentrant=False)
    n, outs = q.shape[2], []
    for head in range(q.shape[1]) if pattern.per_head else [0]:
        own = slice(head, head + 1) if pattern.per_head else slice(None)
        pieces, order = [v[:, own, :0]], [torch.zeros(0, dtype=torch.int64, device=q.device)]
        for i, j, allowed in _blocks(repr(pattern), n, head, how.layer, q.device):
            pieces.append(block(q[:, :, i], k[:, own, j], v[:, own, j], allowed, i, j, how, own))
            order.append(i)
        out = torch.cat(pieces, 2)
        outs.append(out.new_zeros(*out.shape[:2], n, v.shape[-1]).index_copy(2, torch.cat(order), out))
    return torch.cat(outs, 1)


def _block(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, i: Tensor, j: Tensor, how: Logits, own: slice) -> Tensor:
    """Queries of all heads, of which those in ``own`` attend: the bias may depend on the queries of other heads."""
    logits = scores(q[:, own], k, how.scale, how.softcap)
    if how.bias is not None:
        score = _score(how.bias, q, i, j)
        logits = logits + (score[..., own, :, :] if score.dim() > 2 and score.shape[-3] > 1 else score)
    return weighted(logits, v, allowed)[0]


def _blocks(text: str, n: int, head: int, layer: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each block of queries that sees a key: positions i (n,), j (m,), and the allowed pairs (n,m)."""
    for part in plan(text, n, head, layer, classes=False)[1]:
        assert isinstance(part, Tiles)
        within = torch.arange(part.size)
        for row, (query, keys) in enumerate(zip(part.rows, part.keys, strict=True)):
            i, j = query * part.size + within, (keys[:, None] * part.size + within).flatten()
            allowed = torch.ones(len(i), len(j), dtype=torch.bool)
            if part.mask is not None:
                allowed = part.mask[min(row, len(part.mask) - 1)] == 0
            inside = j < n
            yield i[i < n].to(device), j[inside].to(device), allowed[i < n][:, inside].to(device)


def _check_bias(query: Tensor, bias: Tensor) -> None:
    heads, n = query.shape[1:3]
    if tuple(bias.shape) not in ((heads, n, n), (1, n, n)) or not bias.is_floating_point():
        raise ValueError(
            f"bias must be floating-point (H|1,N,N) with H={heads}, N={n}, not {bias.dtype} {tuple(bias.shape)}"
        )
    same_device(query=query, bias=bias)


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Bias | None) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4 or not x.is_floating_point() or x.dtype != query.dtype:
            raise ValueError(f"{name} must be (B,H,N,D) in {query.dtype}, not {x.dtype} {tuple(x.shape)}")
    same_device(query=query, key=key, value=value, mask=mask)
    batch, heads, n, dim = query.shape
    groups, m = key.shape[1:3]
    if key.shape != (batch, groups, m, dim) or value.shape[:3] != key.shape[:3] or not groups or heads % groups:
        raise ValueError(
            f"key must be (B,G,M,D) and value (B,G,M,E) with G dividing H, for query {tuple(query.shape)}; "
            f"they are {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if m < n or (m > n and (mask is not None or bias is not None)):
        least = "at least as many keys as queries" if m < n else "as many keys as queries with a mask or a bias"
        raise ValueError(f"there must be {least}; query is {tuple(query.shape)}, key {tuple(key.shape)}")
    if mask is not None:
        check_mask("mask", mask, (batch, n))
