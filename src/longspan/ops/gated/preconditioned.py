"""The gated delta rule whose writes are scaled, channel by channel, by what keys have been seen."""

import math
from typing import Any

from torch import Tensor

from ..scan import diagonal
from ..tensors import split
from . import general

EPS = 1e-6  # added to the curvature before its logarithm


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    log_fade: Tensor,
    center: Tensor,
    span: float,
    state: tuple[Tensor, Tensor],
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    r"""The gated delta rule, which writes along $M_t k_t$ and reads along $k_t$.

    $$
    P_t = e^{g_t} S_{t-1}, \quad S_t = P_t + \beta_t (M_t \odot k_t) (v_t - P_t^\top k_t)^\top, \quad
    o_t = \frac{S_t^\top q_t}{\sqrt D}
    $$

    $$
    A_t = e^{f_t} A_{t-1} + w_t \, k_t \odot k_t, \quad M_t = r^{-u / (1 + |u|)}, \quad u = \log(A_t + 10^{-6}) - c
    $$

    Args:
        q: (B,H,N,D), of length 1, in float32 at least.
        k: (B,H,N,D), likewise.
        v: (B,H,N,E).
        beta: $\beta_t$, (B,H,N).
        log_decay: $g_t \le 0$, (B,H,N).
        weight: $w_t$, (B,N,H).
        log_fade: $f_t \le 0$, (B,N,H).
        center: $c$, (H,).
        span: $r > 1$: the scales lie between 1 / r and r.
        state: S (B,H,D,E) and A (B,H,D).
        mask: (B,N) bool, as in ``decay_attention``.
        segments: (B,N) int64, as there.
        donate: Allows the call to overwrite the state.

    Returns:
        o (B,H,N,E), and the next state.

    References:
        Tumma, Loo and Rus 2026 (2604.21100).
    """
    sums, curvature = state
    given: Any = {"mask": mask, "segments": segments, "donate": donate}
    squares = weight[..., None] * k.transpose(1, 2).square()  # (B,N,H,D)
    fade = log_fade[..., None].expand_as(squares)
    seen, curvature = diagonal(squares.flatten(2), fade.flatten(2), state=curvature.flatten(1), **given)
    ahead = (split(seen, k.shape[1]) + EPS).log() - center[:, None, None]
    scale = (-math.log(span) * ahead / (1 + ahead.abs())).exp()
    write = (beta[..., None] * scale * k).to(v.dtype)
    # A view, since a compiled graph does not take one tensor for two operands.
    erase = write.view_as(write)
    o, sums = general.recur(
        q.to(v.dtype), write, v, read=k.to(v.dtype), erase=erase, log_decay=log_decay, state=sums, **given
    )
    return o, (sums, curvature.unflatten(1, k.shape[1::2]))
