"""Stick-breaking attention: each key takes a share of what the nearer keys have left of a query's weight."""

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import choose_backend
from ..custom_ops import operation
from ..native import call
from ..native.build.openmp import threads
from ..operands import TRANSFORMED, materialize_neg, transformed
from ..tensors import per_root
from . import scores
from .blocks import by_blocks
from .dense import repeat

OP, SERVED = "stick-breaking attention", ("reference", "torch", "native")
UNIT = "pattern/stick"


class Sticks(NamedTuple):
    """Operands of the kernels."""

    q: Tensor  # (B,H,N,D), the last N of M tokens
    k: Tensor  # (B,G,M,D)
    v: Tensor  # (B,G,M,E)
    scale: float


def attend(q: Tensor, k: Tensor, v: Tensor, at: Tensor | None = None, *, current: bool = False) -> Tensor:
    r"""Attend with the weights $b_{ij} \prod_{j < l < i} (1 - b_{il})$, $b_{ij} = \sigma(q_i \cdot k_j / \sqrt D)$.

    The C++ kernels read keys from the nearest on, and stop where less than $2^{-24}$ of the weight of a query is left.

    Args:
        q: (B,H,N,D) queries, the last N of M tokens.
        k: (B,G,M,D) keys; G divides H.
        v: (B,G,M,E) values.
        at: (B,N) int64, the positions of the queries, if they are not the last tokens of each row.
        current: A query sees the key of its own token, too: $l$ and $j$ run up to $i$.

    Returns:
        The output (B,H,N,E), 0 for the first token without ``current``, which has no key.

    References:
        Tan et al. 2024 (2410.17980), eqs. 1 to 3.
    """
    q, k, v = materialize_neg(q, k, v)
    if current:
        # Queries move on by one token, past which one more key lies.
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        at = None if at is None else at + 1
    n, m = q.shape[2], k.shape[2]
    why_not = call.why_not(q, k, v, None, family="pattern")
    why_not = why_not or ("" if call.available(UNIT) else "they could not be compiled")
    why_not = why_not or ("the queries are not the last tokens" if at is not None else "")
    backend = choose_backend(OP, SERVED, {"native": why_not}, "reference" if transformed() else "")
    if backend == "torch" and transformed():
        raise ValueError(f"backend 'torch' cannot serve this call of {OP}: {TRANSFORMED}")
    if backend == "native":
        return _attend(Sticks(q, k, v, per_root(q.shape[-1])))[0].to(v.dtype)
    if at is None:
        at = torch.arange(m - n, m, device=q.device).expand(len(q), -1)
    return by_blocks(_block, q, at, k, v, size=n if backend == "reference" else 0)


def _block(q: Tensor, at: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = q.shape[1]
    seen = torch.arange(k.shape[2], device=q.device) < at[:, None, :, None]
    logits = scores.products(q, repeat(k, heads))
    # What each key leaves, in logarithms; a key that is not seen leaves everything.
    rest = F.logsigmoid(-logits).masked_fill(~seen, 0.0)
    nearer = rest.flip(-1).cumsum(-1).flip(-1) - rest
    p = (F.logsigmoid(logits) + nearer).masked_fill(~seen, -torch.inf).exp()
    with torch.autocast(v.device.type, enabled=False):
        return (p @ repeat(v, heads).to(p.dtype)).to(v.dtype)


def _forward(r: Sticks) -> tuple[Tensor, Tensor]:
    out, none = _shapes(r)
    _run("longspan_stick_forward", r, r.q, r.k, r.v, out)
    return out, none


def _backward(r: Sticks, grad: Tensor, out: Tensor, none: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (r.q, r.k, r.v))
    _run("longspan_stick_backward", r, r.q, r.k, r.v, out, grad, dq, dk, dv)
    return dq, dk, dv


def _run(name: str, r: Sticks, *tensors: Tensor) -> None:
    (batch, heads, n, dim), (groups, m) = r.q.shape, r.k.shape[1:3]
    sizes = (ctypes.c_long * 7)(batch, groups, heads, n, dim, r.v.shape[-1], m)
    kernel = getattr(call.kernels(UNIT), name)
    failed = kernel(*call.pointers(*tensors), call.strides(*tensors), sizes, call.TYPES[r.v.dtype], r.scale, threads())
    call.check_allocated(failed, "gradients")


def _shapes(r: Sticks) -> tuple[Tensor, Tensor]:
    # In float32 for any operands: gradients are differences of sums of the output.
    return r.v.new_empty(*r.q.shape[:3], r.v.shape[-1], dtype=torch.float32), r.q.new_empty(0)


def _plain(r: Sticks) -> tuple[Tensor, Tensor]:
    n, m = r.q.shape[2], r.k.shape[2]
    at = torch.arange(m - n, m, device=r.q.device).expand(len(r.q), -1)
    return _block(r.q, at, r.k, r.v).float(), r.q.new_zeros(0)


_attend = operation("stick_breaking", Sticks, _forward, shapes=_shapes, again=_plain, inputs=3, backward=_backward)
