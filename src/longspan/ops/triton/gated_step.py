# Parameters of kernels have no types that a checker knows.
# pyright: basic
"""Triton kernel of one token of decay attention and the delta rule, in one launch and one pass over the state.

P = Diag(e^g) S,   u = beta (v - P^T k) or v,   S' = P + k u^T,   o = c S'^T q
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decay import rounded


@triton.jit
def step_kernel(
    q,
    k,
    v,
    decay,
    beta,
    state,
    after,
    out,
    sizes,
    scale,
    strides,
    CHANNELS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DONATE: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
):
    """out (BH,E) and the state ``after``, for BE of its columns: that of ``state`` if DONATE, else (BH,D,E).

    CHANNELS: ``decay`` has one number per channel of the keys. ``sizes`` are the heads, heads
    per key head, and channels of keys and of values; qs and the like the strides of q, without tokens.
    """
    H, R, D, E = sizes
    qs, ks, vs, gs, bs, ss = strides
    i_bh = tl.program_id(1).to(tl.int64)
    b, h = i_bh // H, i_bh % H
    o_d, o_e = tl.arange(0, BD), tl.program_id(0) * BE + tl.arange(0, BE)
    real_d, real_e = o_d < D, o_e < E
    inside = real_d[:, None] & real_e[None, :]
    query = tl.load(q + b * qs[0] + h // R * qs[1] + o_d * qs[2], mask=real_d, other=0.0).to(tl.float32)
    key = tl.load(k + b * ks[0] + h // R * ks[1] + o_d * ks[2], mask=real_d, other=0.0).to(tl.float32)
    new = tl.load(v + b * vs[0] + h * vs[1] + o_e * vs[2], mask=real_e, other=0.0).to(tl.float32)
    if NORMALIZE:
        query *= 1.0 / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
        key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
    at = b * ss[0] + h * ss[1] + o_d[:, None] * ss[2] + o_e[None, :] * ss[3]
    s = tl.load(state + at, mask=inside, other=0.0)
    if decay is not None:
        decay += b * gs[0] + h * gs[1]
        if CHANNELS:
            s *= tl.exp(tl.load(decay + o_d * gs[2], mask=real_d, other=0.0).to(tl.float32))[:, None]
        else:
            s *= tl.exp(tl.load(decay).to(tl.float32))
    if beta is not None:
        new = tl.load(beta + b * bs[0] + h * bs[1]).to(tl.float32) * (new - tl.sum(s * key[:, None], 0))
    s += key[:, None] * new[None, :]
    if DONATE:
        tl.store(state + at, s, mask=inside)
    else:
        tl.store(after + i_bh * D * E + o_d[:, None] * E + o_e[None, :], s, mask=inside)
    y = tl.sum(s * query[:, None], 0) * scale
    y = rounded(y, out.dtype.element_ty).to(out.dtype.element_ty)
    tl.store(out + i_bh * E + o_e, y, mask=real_e)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    scale: float,
    donate: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """o (B,H,1,E) and the state (B,H,D,E), for operands that fit each other; see ``gated.triton.step``."""
    batch, heads, keys, values = state.shape
    out = torch.empty(batch, heads, 1, values, dtype=v.dtype, device=v.device)
    after = state if donate else torch.empty(state.shape, dtype=state.dtype, device=state.device)
    block_d = triton.next_power_of_2(keys)
    # Columns of a program: few, so that few heads also fill a GPU, and so many that a row is one memory access.
    block_e = min(triton.next_power_of_2(values), max(8, 2048 // block_d), 32)
    channels = log_decay is not None and log_decay.dim() == 4
    decays = (0, 0, 0) if log_decay is None else (*log_decay.stride()[:2], log_decay.stride(-1))
    qs, ks, vs = ((*t.stride()[:2], t.stride(3)) for t in (q, k, v))
    rates = (0, 0) if beta is None else beta.stride()[:2]
    # Triton's types know neither the numbers that it makes constants nor ``num_warps``.
    kernel: Any = step_kernel[(triton.cdiv(values, block_e), batch * heads)]
    kernel(
        *(q, k, v, log_decay, beta, state, after, out),
        *((heads, heads // q.shape[1], keys, values), scale, (qs, ks, vs, decays, rates, state.stride())),
        CHANNELS=channels,
        NORMALIZE=normalize,
        DONATE=donate,
        BD=block_d,
        BE=block_e,
        num_warps=4,
    )
    return out, after
