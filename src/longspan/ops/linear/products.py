"""Sums over tokens of products of two rows, as features that exist for one block of tokens at a time."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..custom_ops import contiguous_like, kernel
from ..native import call
from ..native.build.openmp import threads
from ..operands import contiguous, mark_overwritten

UNIT = "linear/products"


class Products(NamedTuple):
    """Queries that read sums of features, and keys that write: feature f is the product of rows ``pairs[:, f]``."""

    q: Tensor  # (B,H,P,N) rows of queries
    k: Tensor  # (B,H,P,M) rows of keys
    v: Tensor  # (B,H,M,E)
    sums: Tensor  # (B,H,F,E)
    pairs: Tensor  # (2,F) int32
    scales: Tensor  # (F,), factors of the features


def composed(r: Products) -> tuple[Tensor, Tensor]:
    """Return phi(q)^T sums (B,H,N,E), and phi(k) v (B,H,F,E), by operations of torch."""
    return features(r.q, r.pairs, r.scales).mT @ r.sums, features(r.k, r.pairs, r.scales) @ r.v


def features(rows: Tensor, pairs: Tensor, scales: Tensor) -> Tensor:
    """Return the features of all tokens: (...,P,N) -> (...,F,N)."""
    # Rows are selected faster than columns.
    first, second = (rows.index_select(-2, chosen) for chosen in pairs)
    return first * second * scales[:, None]


def _run(name: str, r: Products, h: Tensor, *tensors: Tensor | None) -> None:
    (batch, heads, channels, n), (count, values) = h.shape, r.sums.shape[2:]
    sizes = (ctypes.c_long * 5)(batch * heads, channels, n, values, count)
    run = getattr(call.kernels(UNIT), name)
    call.check_allocated(run(*call.pointers(r.pairs, r.scales, h, *tensors), sizes, threads()), "features")


def _forward(r: Products, keeps: bool) -> tuple[Tensor, Tensor]:
    found, written = _shapes(r, keeps)
    _run("longspan_products_read", r, r.q, r.sums, found)
    _run("longspan_products_write", r, r.k, r.v, written)
    return found, written


def _backward(
    r: Products, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    read, written = (t.contiguous() for t in grads)
    results = [torch.empty_like(t) if need else None for t, need in zip(r[:4], needed, strict=True)]
    dq, dk, dv, dsums = results
    if dq is not None:
        _run("longspan_products_slopes", r, r.q, read, r.sums, dq)
    if dk is not None:
        _run("longspan_products_slopes", r, r.k, r.v, written, dk)
    if dv is not None:
        _run("longspan_products_read", r, r.k, written, dv)
    if dsums is not None:
        _run("longspan_products_write", r, r.q, read, dsums)
    return results


def _shapes(r: Products, keeps: bool) -> tuple[Tensor, Tensor]:
    return r.sums.new_empty(*r.q.shape[:2], r.q.shape[3], r.sums.shape[3]), contiguous_like(r.sums)


native = kernel(
    "products",
    Products,
    _forward,
    _backward,
    shapes=_shapes,
    again=composed,
    prepare=lambda r: Products(*contiguous(*r)),
    inputs=4,
    kept=0,
)
"""``composed`` in C++, in float32. Features never lie in memory for more than 64 tokens. Raises MemoryError."""


def why_not(*tensors: Tensor) -> str:
    """Return why ``native`` cannot serve these operands; empty if it can."""
    if reason := call.unreadable(*tensors):
        return reason
    if any(t.dtype != torch.float32 for t in tensors):
        return "they take float32"
    if not all(t.numel() for t in tensors):
        return "there is nothing to compute"
    return "" if call.available(UNIT) else "they could not be compiled"


def step(r: Products, left: Tensor | None, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token in one pass over the sums, which ``left`` (B,H,1) multiplies first, in place with ``donate``.

    Returns:
        phi(q)^T sums (B,H,1,E) of the new sums, and those; None for operands that need the operations of torch.
    """
    if not call.readable(r.q, r.k, r.v, left, dtype=torch.float32, wide=(r.sums,)) or not call.available(UNIT):
        return None
    q, k, v, left = contiguous(r.q, r.k, r.v, left)
    sums = r.sums.contiguous() if donate else r.sums.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(v)
    _run("longspan_products_step", r._replace(sums=sums), q, k, v, left, sums, out)
    if donate:
        mark_overwritten(sums)
    return out, sums
