"""C++ kernels of softmax attention under a pattern, forward and backward."""

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..native import call
from ..native.build.openmp import threads
from ..native.call import TYPES, kernels, pointers, strides

if TYPE_CHECKING:
    from .schedule import Listed


class Gates(NamedTuple):
    """Forget gates: the logit of query i and key j gets ``sums`` at i less ``sums`` at j."""

    sums: Tensor | None = None  # (B,H,M) float64, contiguous, never rising along M
    reach: Tensor | None = None  # (B,H) float32: blocks are left out whose logits all fall by more than this


NO_GATES = Gates()


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return why the kernels cannot run these operands, or "" if they can. The first call compiles the kernels."""
    return call.why_not(q, k, v, None, family="pattern")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: "Listed",
    scale: float,
    softcap: float = 0.0,
    gates: Gates = NO_GATES,
) -> None:
    """Attend within the listed blocks; write ``out`` and ``lse``.

    Takes O(pairs of the listed blocks) time, and memory for a few blocks per thread. The result is bitwise equal for
    any number of threads.

    Args:
        q: (B,H,N,D) queries, the last N of M tokens, float32 or bfloat16, of any strides.
        k: (B,G,M,D) keys, likewise.
        v: (B,G,M,E) values, likewise.
        out: (B,H,N,E) output, written.
        lse: (B,H,N) log-sum-exp of each row, written.
        blocks: The blocks of all M tokens.
        scale: Factor of the logits.
        softcap: Cap of the logits, see ``sparse_attention``; 0: none.
        gates: Forget gates.

    Raises:
        MemoryError: If the blocks of all threads do not fit into memory.
    """
    failed = kernels("pattern/forward").longspan_pattern_forward(
        *pointers(q, k, v, out, lse, _offsets(q, k, blocks), blocks.keys, blocks.which, blocks.masks, *gates),
        strides(q, k, v, out),
        _sizes(q, k, v, blocks),
        TYPES[v.dtype],
        scale,
        softcap,
        threads(),
    )
    if failed:
        raise MemoryError(f"not enough memory for the blocks of {threads()} threads")


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
    gates: Gates = NO_GATES,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, each contiguous, and that of the sums of the gates, float64, None without gates.

    ``out`` and ``lse`` may belong to a softmax over more keys than these blocks. Each thread processes whole key heads
    and holds float32 sums of one head's gradients, so at most B G threads have work. The result is bitwise equal for
    any number of threads.

    Raises:
        MemoryError: If the sums of all threads do not fit into memory.
    """
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsums = None if gates.sums is None else torch.zeros_like(gates.sums)
    listed = (_offsets(q, k, blocks), *blocks[2:])
    failed = kernels("pattern/backward").longspan_pattern_backward(
        *pointers(q, k, v, out, grad, dq, dk, dv, lse, *listed, *gates, dsums),
        strides(q, k, v, out, grad, dq, dk, dv),
        _sizes(q, k, v, blocks),
        TYPES[v.dtype],
        scale,
        softcap,
        threads(),
    )
    if failed:
        raise MemoryError(f"not enough memory for the gradient sums of {threads()} threads")
    return dq, dk, dv, dsums


def _offsets(q: Tensor, k: Tensor, blocks: "Listed") -> Tensor:
    """Offsets from the first block that has a query."""
    return blocks.offsets[(k.shape[2] - q.shape[2]) // blocks.size :]


def _sizes(q: Tensor, k: Tensor, v: Tensor, blocks: "Listed") -> ctypes.Array[ctypes.c_long]:
    (batch, heads, n, dim), (groups, m) = q.shape, k.shape[1:3]
    rows = len(_offsets(q, k, blocks)) - 1
    return (ctypes.c_long * 9)(batch, groups, heads, n, dim, v.shape[-1], rows, m, blocks.size)
