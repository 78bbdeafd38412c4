"""Softmax attention under a pattern by the C++ kernels, forward and backward."""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..native import call
from ..native.build.openmp import threads
from ..native.call import TYPES, kernels, pointers, strides

if TYPE_CHECKING:
    from .schedule import Listed


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why the kernels cannot serve these operands; "" where they can. Compiles them on first use."""
    return call.why_not(q, k, v, None, family="pattern")


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: "Listed", scale: float, softcap: float = 0.0
) -> None:
    """q (B,H,N,D), k (B,G,M,D), v (B,G,M,E), of any strides, float32 or bfloat16; fills out (B,H,N,E), lse (B,H,N).

    Queries are the last N of M tokens; ``blocks`` are those of all tokens. ``softcap``: see ``sparse_attention``.
    Time is O(pairs of the listed blocks), memory beyond the operands a few blocks per thread. Any number of threads
    gives the same bits. Raises MemoryError where those blocks do not fit.
    """
    failed = kernels("pattern").longspan_pattern_forward(
        *pointers(q, k, v, out, lse, _offsets(q, k, blocks), blocks.keys, blocks.which, blocks.masks),
        strides(q, k, v, out),
        _sizes(q, k, v, blocks),
        TYPES[v.dtype],
        scale,
        softcap,
        threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the blocks of {threads()} threads")


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    lse: Tensor,
    blocks: "Listed",
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, each contiguous; out and lse may be those of a softmax over more keys than these.

    Threads share out the heads of keys, so that more threads than B G gain nothing; each holds float32 sums of one
    head's gradients. Any number of threads gives the same bits. Raises MemoryError where those do not fit.
    """
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    failed = kernels("pattern").longspan_pattern_backward(
        *pointers(q, k, v, out, grad, dq, dk, dv, lse, _offsets(q, k, blocks), blocks.keys, blocks.which, blocks.masks),
        strides(q, k, v, out, grad, dq, dk, dv),
        _sizes(q, k, v, blocks),
        TYPES[v.dtype],
        scale,
        softcap,
        threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the sums of {threads()} threads")
    return dq, dk, dv


def _offsets(q: Tensor, k: Tensor, blocks: "Listed") -> Tensor:
    """From the first block on that has a query."""
    return blocks.offsets[(k.shape[2] - q.shape[2]) // blocks.size :]


def _sizes(q: Tensor, k: Tensor, v: Tensor, blocks: "Listed") -> ctypes.Array[ctypes.c_long]:
    (batch, heads, n, dim), (groups, m) = q.shape, k.shape[1:3]
    rows = len(_offsets(q, k, blocks)) - 1
    return (ctypes.c_long * 9)(batch, groups, heads, n, dim, v.shape[-1], rows, m, blocks.size)
