"""Softmax attention with forget gates: the logits of a key fall with every gate between it and the query."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import choose_backend
from ..custom_ops import operation
from ..native.call import available
from ..operands import TRANSFORMED, materialize_neg, transformed
from ..sparse import native as kernels
from ..sparse.schedule import listed
from ..tensors import per_root
from . import scores
from .blocks import by_blocks
from .dense import repeat

OP, SERVED = "attention with forget gates", ("reference", "torch", "native")
PATTERN = "causal()"
BITS = 24  # blocks are left out whose weights add up to less than 2^-24 of a row's, the rounding of float32


class Forgetting(NamedTuple):
    """Operands of the kernels."""

    q: Tensor  # (B,H,N,D), the last N of M tokens
    k: Tensor  # (B,G,M,D)
    v: Tensor  # (B,G,M,E)
    sums: Tensor  # (B,H,M) float64
    scale: float


def attend(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, at: Tensor | None = None) -> Tensor:
    r"""Causal softmax attention with the logits $q_i \cdot k_j / \sqrt D + c_i - c_j$.

    All pairs within reach are computed, in memory of the size of the operands. The C++ kernels leave out blocks of keys
    whose weights certainly add up to less than $2^{-24}$ of those of a row, by the norms of queries and keys.

    Args:
        q: (B,H,N,D) queries, the last N of M tokens.
        k: (B,G,M,D) keys; G divides H.
        v: (B,G,M,E) values.
        sums: (B,H,M) float64, $c_j$, the sum of the logarithms of the gates up to each token; it never rises along M.
        at: (B,N) int64, the positions of the queries, if they are not the last tokens of each row.

    Returns:
        The output (B,H,N,E).

    References:
        Lin et al. 2025 (2503.02130), eq. 5; Lin et al. 2025 (2504.06949), section 3, for what is left out.
    """
    q, k, v = materialize_neg(q, k, v)
    n, m = q.shape[2], k.shape[2]
    if not m:
        return (q[..., :1] * 0).expand(*q.shape[:3], v.shape[3]).to(v.dtype)
    why_not = kernels.why_not(q, k, v)
    if not why_not:
        why_not = (
            "the queries are not the last tokens" if at is not None else "one query has no use for them" * (n == 1)
        )
    backend = choose_backend(OP, SERVED, {"native": why_not}, "reference" if transformed() else "")
    if backend == "torch" and transformed():
        raise ValueError(f"backend 'torch' cannot serve this call of {OP}: {TRANSFORMED}")
    if backend == "native":
        return _attend(Forgetting(q, k, v, sums, per_root(q.shape[-1])))[0]
    if at is None:
        at = torch.arange(m - n, m, device=q.device).expand(len(q), -1)
    return by_blocks(_block, q, at, k, v, sums, size=n if backend == "reference" else 0)


def _block(q: Tensor, at: Tensor, k: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    own = sums.gather(2, at.clamp(max=k.shape[2] - 1)[:, None].expand(-1, sums.shape[1], -1))
    logits = scores.products(q, repeat(k, q.shape[1]))
    logits = logits + (own[..., None] - sums[:, :, None]).to(logits.dtype)
    p = scores.weights(logits, torch.arange(k.shape[2], device=q.device) <= at[:, None, :, None])
    with torch.autocast(v.device.type, enabled=False):
        return (p @ repeat(v, q.shape[1]).to(p.dtype)).to(v.dtype)


def _gates(r: Forgetting) -> kernels.Gates:
    """The own key of a query has a logit of at least -bound, and one that falls by ``reach`` at most bound - reach."""
    heads = r.q.shape[1]
    longest = (x.detach().float().square().sum(-1).amax(-1).sqrt() for x in (r.q, r.k))
    bound = r.scale * next(longest) * next(longest).repeat_interleave(heads // r.k.shape[1], 1)
    reach = 2 * bound + math.log(r.k.shape[2]) + BITS * math.log(2)
    return kernels.Gates(r.sums.detach().contiguous(), reach.contiguous())


def _forward(r: Forgetting) -> tuple[Tensor, Tensor]:
    out, lse = _shapes(r)
    kernels.forward(r.q, r.k, r.v, out, lse, _listed(r), r.scale, gates=_gates(r))
    return out, lse


def _backward(r: Forgetting, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dsums = kernels.backward(r.q, r.k, r.v, out, grad, lse, _listed(r), r.scale, gates=_gates(r))
    assert dsums is not None
    return dq, dk, dv, dsums


def _listed(r: Forgetting):
    found = listed(PATTERN, r.k.shape[2], 0, 0)
    assert found is not None
    return found


def _shapes(r: Forgetting) -> tuple[Tensor, Tensor]:
    return r.v.new_empty(*r.q.shape[:3], r.v.shape[-1]), r.q.new_empty(r.q.shape[:3], dtype=torch.float32)


def _plain(r: Forgetting) -> tuple[Tensor, Tensor]:
    n, m = r.q.shape[2], r.k.shape[2]
    at = torch.arange(m - n, m, device=r.q.device).expand(len(r.q), -1)
    return _block(r.q, at, r.k, r.v, r.sums), r.q.new_zeros(r.q.shape[:3], dtype=torch.float32)


_attend = operation(
    "forgetting",
    Forgetting,
    _forward,
    shapes=_shapes,
    again=_plain,
    inputs=4,
    backward=_backward,
    ready=lambda r: available("pattern/backward"),
)
