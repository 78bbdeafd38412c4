"""Attention to a fixed number of slots, whose keys and values decay slot by slot."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tensors import upcast_half
from . import recur, value_channels

NOTHING = -1e30  # the logarithm of an empty sum; finite, so that differences are numbers


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    *,
    log_decay: Tensor,
    scale: float | None = None,
    state: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    r"""Return $o_t = V_t^\top \mathrm{softmax}(c K_t q_t)$ for M slots with keys $K_t$ and values $V_t$.

    $$
    K_t = \mathrm{Diag}(e^{g_t}) K_{t-1} + s_t k_t^\top, \quad V_t = \mathrm{Diag}(e^{g_t}) V_{t-1} + s_t v_t^\top
    $$

    Args:
        q: (B,H,N,D).
        k: (B,H,N,D).
        v: (B,H,N,E).
        write: $s_t$, (B,H,N,M), the share of the token in each slot.
        log_decay: $g_t \le 0$, (B,H,N,M).
        scale: $c$; None is $1 / \sqrt D$.
        state: $K^\top$ (B,H,D,M) and $V$ (B,H,M,E); None starts from zeros.
        mask: (B,N) bool, as in ``decay_attention``.
        segments: (B,N) int64, as there.
        donate: Allows the call to overwrite the state.

    Returns:
        o (B,H,N,E), and the next state.

    References:
        Peng et al. 2021 (2110.02488), section 2; Zhang et al. 2024 (2409.07146), eq. 7.
    """
    keys, values = (None, None) if state is None else state
    write = write.to(v.dtype)
    given: Any = {"log_decay": log_decay, "mask": mask, "segments": segments, "donate": donate}
    scores, keys = value_channels.recur(q, k, write, scale=scale, state=keys, **given)
    shares = upcast_half(scores).softmax(-1).to(v.dtype)
    o, values = recur(shares, write, v, scale=1.0, state=values, **given)
    return o, (keys, values)


def running_softmax(
    logits: Tensor, total: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return weights and log decays of a running average, in which each token has its share of a softmax over time.

    With $z_t = \log \sum_{j \le t} e^{a_j}$, the weight of a token is $e^{a_t - z_t}$, and the log decay of the sum
    before it $z_{t-1} - z_t$.

    Args:
        logits: $a_t$ (B,H,N,D), in float32 at least.
        total: $z$ before the first token (B,H,D); ``NOTHING`` at first.
        mask: (B,N) bool; masked tokens change nothing.
        segments: (B,N) int64; averages start anew at each border, ``total`` belongs to the first segment.

    Returns:
        The weights and the log decays (B,H,N,D), and $z$ after the last token (B,H,D).
    """
    if not logits.shape[2]:
        return logits, logits, total
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, :, None], NOTHING)
    z = _running_total(logits, total, segments)
    before = torch.cat([total[:, :, None], z[:, :, :-1]], 2)
    if segments is not None:
        # The first token of a sequence follows nothing.
        begins = F.pad(segments.diff() != 0, (1, 0))
        before = before.masked_fill(begins[:, None, :, None], NOTHING)
    return (logits - z).exp(), before - z, z[:, :, -1].clone()


def _running_total(logits: Tensor, total: Tensor, segments: Tensor | None) -> Tensor:
    """Return the logarithm of the sum of e^logits up to each token: (B,H,N,D)."""
    if segments is None:
        return torch.cat([total[:, :, None], logits], 2).logcumsumexp(2)[:, :, 1:]
    first = (segments == segments[:, :1])[:, None, :, None]
    z, step = logits, 1
    while step < logits.shape[2]:
        same = F.pad(segments[:, step:] == segments[:, :-step], (step, 0))[:, None, :, None]
        z = torch.logaddexp(z, F.pad(z[:, :, :-step], (0, 0, step, 0)).masked_fill(~same, NOTHING))
        step *= 2
    return torch.logaddexp(z, total[:, :, None].expand_as(z).masked_fill(~first, NOTHING))
