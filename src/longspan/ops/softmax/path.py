"""Softmax attention over keys that a product of Householder maps has moved since they were written."""

import ctypes
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..backends import choose_backend
from ..custom_ops import contiguous_like, operation
from ..native import call
from ..native.build.openmp import threads
from ..operands import contiguous, materialize_neg, transformed
from ..tensors import per_root, upcast_half

CHUNK = 64  # tokens whose maps are one product
OP, SERVED, UNIT = "attention over moved keys", ("reference", "torch", "native"), "pattern/moved"


class Past(NamedTuple):
    """Keys that the maps of all tokens so far have moved, and their values."""

    keys: Tensor  # (B,G,M,D), float32 or better
    values: Tensor  # (B,G,M,E)
    seen: Tensor | None  # (B,M) bool, slots in use; None: all are


class _Chunks(NamedTuple):
    """What the tokens of each chunk make of it, (B,G,chunks,...): C tokens, R query heads per head of keys."""

    queries: Tensor  # (B,G,c,R,C,D) moved back to the beginning of the chunk
    near: Tensor  # (B,G,c,R,C,C) logits within the chunk
    keys: Tensor  # (B,G,c,C,D) moved to the end of the chunk
    values: Tensor  # (B,G,c,C,E)
    maps: Tensor  # (B,G,c,D,D) moves a row of keys from the beginning to the end


def causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Return the output (B,H,N,E) of ``attend`` without earlier tokens.

    The kernels move queries in place of keys, in O(N) memory. Raises ValueError if a forced backend cannot serve it.
    """
    q, k, v, w, beta = materialize_neg(q, k, v, w, beta)
    why_not = call.unreadable(q, k, v, w, beta)
    if any(t.dtype == torch.float64 for t in (q, k, v, w, beta)):
        why_not = why_not or "they take float32 and bfloat16"
    why_not = why_not or ("" if q.numel() and q.shape[2] > CHUNK else f"there are at most {CHUNK} tokens")
    why_not = why_not or ("" if call.available(UNIT) else "they could not be compiled")
    if (backend := choose_backend(OP, SERVED, {"native": why_not})) != "native":
        return _attend(q, k, v, w, beta, None, backend)[0]
    n, e = q.shape[2], v.shape[3]
    with torch.autocast(q.device.type, enabled=False):
        parts = _chunks(q, k, v, w, beta, CHUNK)
        near = parts.near.masked_fill(_ahead(parts.near), -torch.inf)
        o = _moved(_Chunks(*contiguous(*(_whole(t) for t in parts._replace(near=near)))))[0]
    return o.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :n, :e].to(v.dtype)


def _ahead(near: Tensor) -> Tensor:
    return torch.ones(near.shape[-2:], dtype=torch.bool, device=near.device).triu(1)


def _whole(x: Tensor) -> Tensor:
    """Pad channels to a multiple of 16, in both directions if they are those of a map."""
    short = -x.shape[-1] % 16
    return F.pad(x, (0, short, 0, short) if x.shape[-1] == x.shape[-2] != CHUNK else (0, short)) if short else x


def attend(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, past: Past | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Causal softmax attention with the logits $q_i \cdot (H_i \cdots H_{j+1} k_j) / \sqrt D$.

    $H_l = I - b_l w_l w_l^T$. Keys move: after each token t, all earlier keys become $H_t k_j$, and a query reads them
    by a plain product. Chunks of tokens move them at once, by the product of their maps. The backward pass computes
    groups of chunks again, so that memory grows with $N^{1.5}$.

    Args:
        q: (B,H,N,D) queries.
        k: (B,G,N,D) keys; G divides H.
        v: (B,G,N,E) values.
        w: (B,G,N,D) directions of norm 1.
        beta: (B,G,N) in 0 ... 2.
        past: Earlier tokens, or None.

    Returns:
        The output (B,H,N,E), and the earlier and the new keys after the last token, (B,G,M,D) and (B,G,N,D).

    References:
        Yang et al. 2025 (2505.16381), eqs. 2 to 6; Joffrain et al. 2006 for the products (UT transform).
    """
    backend = choose_backend(OP, SERVED, {"native": "they do not return keys"})
    return _attend(q, k, v, w, beta, past, backend)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, past: Past | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    chunk = 1 if backend == "reference" else CHUNK
    n, earlier = q.shape[2], 0 if past is None else past.keys.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        parts = _chunks(q, k, v, w, beta, min(chunk, n))
        keys = parts.keys[:, :, 0, :0] if past is None else past.keys.to(parts.keys.dtype)
        values = parts.values[:, :, 0, :0] if past is None else past.values.to(parts.values.dtype)
        hidden = None if past is None or past.seen is None else ~past.seen
        count = parts.keys.shape[2]
        group = max(1, math.isqrt(count))
        again = torch.is_grad_enabled() and not transformed() and not torch.compiler.is_compiling() and count > 1
        outs = []
        for start in range(0, count, group):
            own = _Chunks(*(t[:, :, start : start + group] for t in parts))
            given = (keys, values, hidden, own)
            o, keys = checkpoint(_read, *given, use_reentrant=False) if again else _read(*given)
            values = torch.cat([values, own.values.flatten(2, 3)], 2)
            outs.append(o)
        o = torch.cat(outs, 3).flatten(1, 2)[:, :, :n]
    return o.to(v.dtype), keys[:, :, :earlier], keys[:, :, earlier : earlier + n]


def _chunks(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, size: int) -> _Chunks:
    groups, n = k.shape[1:3]
    q, k, v, w, beta = (upcast_half(t) for t in (q * per_root(q.shape[-1]), k, v, w, beta[..., None]))
    count = -(-n // size)
    # Padding has beta 0, whose map is the identity.
    pad = (0, 0, 0, count * size - n)
    q = F.pad(q, pad).unflatten(1, (groups, -1)).unflatten(3, (count, size)).transpose(2, 3)
    k, v, w, beta = (F.pad(t, pad).unflatten(2, (count, size)) for t in (k, v, w, beta))
    scaled = beta * w
    # A column y becomes y - w^T s, where (I + L) s = scaled y with the lower triangle L of scaled w^T.
    lower = (scaled @ w.mT).tril(-1)
    later = (scaled @ k.mT).tril(-1)  # what the tokens after a key see of it
    solved = torch.linalg.solve_triangular(
        lower + torch.eye(size, dtype=lower.dtype, device=lower.device),
        torch.cat([scaled, later], -1),
        upper=False,
        unitriangular=True,
    )
    moves, moved = solved[..., : w.shape[-1]], solved[..., w.shape[-1] :]
    back = (q @ w[:, :, :, None].mT).tril()  # (B,G,c,R,C,C)
    near = q @ k[:, :, :, None].mT - back @ moved[:, :, :, None]
    maps = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device) - moves.mT @ w
    return _Chunks(q - back @ moves[:, :, :, None], near, k - moved.mT @ w, v, maps)


def _read(keys: Tensor, values: Tensor, hidden: Tensor | None, own: _Chunks) -> tuple[Tensor, Tensor]:
    """Read some chunks after all keys before them: (B,G,R,c C,E), and all keys after them."""
    outs, ahead = [], _ahead(own.near)
    for c in range(own.keys.shape[2]):
        far = own.queries[:, :, c] @ keys[:, :, None].mT
        if hidden is not None:
            more = F.pad(hidden, (0, far.shape[-1] - hidden.shape[1]))
            far = far.masked_fill(more[:, None, None, None], -torch.inf)
        p = torch.cat([far, own.near[:, :, c].masked_fill(ahead, -torch.inf)], -1).softmax(-1)
        values = torch.cat([values, own.values[:, :, c]], 2)
        outs.append(p @ values[:, :, None])
        keys = torch.cat([keys @ own.maps[:, :, c], own.keys[:, :, c]], 2)
    return torch.cat(outs, 3), keys


def _forward(r: _Chunks) -> tuple[Tensor, Tensor]:
    out, lse = _shapes(r)
    _run("forward", r, r.queries, r.near, r.keys.mT, r.values, r.maps.mT, out, lse)
    return out, lse


def _backward(r: _Chunks, grad: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
    grads = [contiguous_like(t) for t in r]
    dq, dnear, dk, dv, dmaps = grads
    given = (r.queries, r.near, r.keys, r.keys.mT, r.values, r.values.mT, r.maps, r.maps.mT, out, lse, grad)
    _run("backward", r, *given, dq, dnear, dk, dv, dmaps)
    return grads


def _run(name: str, r: _Chunks, *tensors: Tensor) -> None:
    batch, groups, count, shared, _, dim = r.queries.shape
    sizes = (ctypes.c_long * 5)(batch * groups, count, shared, dim, r.values.shape[-1])
    given = contiguous(*tensors)
    failed = getattr(call.kernels(UNIT), f"longspan_moved_{name}")(*call.pointers(*given), sizes, threads())
    call.check_allocated(failed, "queries")


def _shapes(r: _Chunks) -> tuple[Tensor, Tensor]:
    shape = r.queries.shape[:-1]
    return r.values.new_empty(*shape, r.values.shape[-1]), r.values.new_empty(shape)


def _composed(r: _Chunks) -> tuple[Tensor, Tensor]:
    o, _ = _read(r.keys[:, :, 0, :0], r.values[:, :, 0, :0], None, r)
    return o.unflatten(3, (-1, CHUNK)).transpose(2, 3), r.queries.new_zeros(r.queries.shape[:-1])


_moved = operation("moved", _Chunks, _forward, shapes=_shapes, again=_composed, inputs=5, backward=_backward)
