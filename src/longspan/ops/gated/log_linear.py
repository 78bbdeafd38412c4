"""Log-linear attention: decay attention whose keys are weighted by their distance on a logarithmic scale.

References: Guo et al. 2025 (2506.04761), sections 3.1 to 3.3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tensors import per_root, positions, upcast_half
from . import recur
from .decays import LOWEST


def start(like: Tensor, batch: int, levels: int, heads: int, keys: int, values: int) -> tuple[Tensor, Tensor]:
    """Return the state before the first token: sums (batch,levels-1,heads,keys,values), and count (batch,) int64."""
    sums = upcast_half(like.new_zeros(batch, levels - 1, heads, keys, values))
    return sums, torch.zeros(batch, dtype=torch.long, device=like.device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    *,
    log_decay: Tensor,
    scale: float | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    r"""$o_t = c \sum_{s \le t} \lambda_{t, l(t,s)} e^{g_{s+1} + \dots + g_t} (q_t \cdot k_s) v_s$, for L levels.

    $l(t, s)$ is the bit length of $t \oplus s$: 0 for s = t, and l where s lies in the first and t in the second half
    of a block of $2^l$ tokens that begins at a multiple of $2^l$. The last level holds all larger distances too. Time
    is O(N log N) for a whole sequence, and O(L) for a token after a state.

    Args:
        q: (B,G,N,D), where G divides H.
        k: (B,G,N,D).
        v: (B,H,N,E), float32 at least.
        weights: $\lambda$ (B,H,N,L), L >= 2.
        log_decay: (B,H,N).
        scale: $c$; None is $1 / \sqrt D$.
        mask: (B,N) bool; masked tokens have no position, and their output is 0.
        segments: (B,N) int64.
        state: From ``start`` or an earlier call. ``sums[:, j]`` holds the tokens of the block of $2^j$ tokens that bit
            j of the count stands for, 0 where the bit is 0. The last one holds all earlier tokens.

    Returns:
        o (B,H,N,E), and the next state, None without a state.
    """
    if state is not None and q.shape[2] == 1:
        factor = per_root(q.shape[-1]) if scale is None else scale
        return _step(q, k, v, weights, log_decay, factor, mask, *state)
    n, levels = q.shape[2], weights.shape[-1]
    x = v.transpose(1, 2)
    at, after = positions(x, None if state is None else state[1], mask=mask, segments=segments)
    far = state is not None or n > 2 ** (levels - 2)  # whether any pair may be of the last level
    scale = per_root(q.shape[-1]) if scale is None else scale
    groups = v.shape[1] // max(k.shape[1], 1)
    own = (q * k).sum(-1, keepdim=True, dtype=v.dtype).repeat_interleave(groups, 1) * scale
    out, ends = weights[..., :1] * own * v, []
    out = out if mask is None else out.masked_fill(~mask[:, None, :, None], 0.0)

    def sums(values: Tensor, ids: Tensor | None, begin: Tensor | None) -> tuple[Tensor, Tensor]:
        return recur(q, k, values, log_decay=log_decay, scale=scale, mask=mask, segments=ids, state=begin)

    before = state[0] if state is not None else None
    # One level at least, so that gradients reach the decays of a single token too.
    for level in range(1, levels - 1 if far else max(max(n - 1, 0).bit_length(), 1) + 1):
        begin = None
        if state is not None and before is not None:
            # The first half of the block is complete where the bit of the count is 1, and being read where it is 0.
            complete = (state[1] >> (level - 1) & 1).bool()[:, None, None, None]
            begin = torch.where(complete, before[:, level - 1], before[:, : level - 1].sum(1))
        second = (at >> (level - 1) & 1).bool()[:, None, :, None]
        o, end = sums(v.masked_fill(second, 0.0), _blocks(at >> level, segments), begin)
        out = out + weights[..., level, None] * o.masked_fill(~second, 0.0)
        ends.append(end)
    if far:
        # All tokens before the block: all without those of the block.
        block = levels - 2
        begin = (None, None) if before is None else (before.sum(1), before[:, :block].sum(1))
        everything, end = sums(v, segments, begin[0])
        near, last = sums(v, _blocks(at >> block, segments), begin[1])
        out = out + weights[..., -1:] * (everything - near)
        if state is not None:
            whole = after % 2**block == 0
            ends.append(end - last.masked_fill(whole[:, None, None, None], 0.0))
    if state is None:
        return out, None
    bits = after[:, None] >> torch.arange(levels - 2, device=after.device) & 1
    stored = F.pad(bits.bool(), (0, 1), value=True)[..., None, None, None]
    return out, (torch.stack(ends, 1).masked_fill(~stored, 0.0), after)


def _blocks(block: Tensor, segments: Tensor | None) -> Tensor:
    """Number the blocks of each sequence: block (B,N), segments (B,N) -> (B,N), rising by 1 at every border."""
    border = block[:, 1:] != block[:, :-1]
    if segments is not None:
        border = border | (segments[:, 1:] != segments[:, :-1])
    return F.pad(border.long().cumsum(1), (1, 0))[:, : block.shape[1]]


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    log_decay: Tensor,
    scale: float,
    mask: Tensor | None,
    sums: Tensor,
    count: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """``attend`` for one token after a state: reads all sums, and merges those that the token completes."""
    groups, slots = v.shape[1] // max(k.shape[1], 1), sums.shape[1]
    q, k = (t.to(sums.dtype).repeat_interleave(groups, 1) for t in (q, k))
    alpha = log_decay.to(sums.dtype).clamp(min=LOWEST).exp()[:, None, :, :, None]  # (B,1,H,1,1)
    decayed, new = sums * alpha, k.mT * v.to(sums.dtype)  # (B,J,H,D,E), (B,H,D,E)
    reads = (scale * q[:, None] @ decayed)[..., 0, :]  # (B,J,H,E)
    out = (weights[:, :, 0, 1:].transpose(1, 2)[..., None] * reads).sum(1)[:, :, None]
    out = out + weights[..., :1] * (scale * (q * k).sum(-1, keepdim=True)) * v
    # Bit j of the count turns from 0 to 1 where all lower bits are 1: its sum becomes that of the token and all lower
    # sums, which are cleared. The last sum grows where all bits below it are 1.
    bits = (count[:, None] >> torch.arange(slots, device=count.device) & 1).bool()  # (B,J)
    full = F.pad(bits[:, :-1].long().cumprod(1).bool(), (1, 0), value=True)  # all bits below j are 1
    last = torch.arange(slots, device=count.device) == slots - 1
    merged, cleared = full & (~bits | last), full & bits & ~last
    lower = F.pad(decayed.cumsum(1)[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)) + new[:, None]
    kept = decayed.masked_fill(cleared[..., None, None, None], 0.0)
    after = torch.where(merged[..., None, None, None], kept + lower, kept)
    step = 1
    if mask is not None:
        real = mask[:, 0]
        out = out.masked_fill(~real[:, None, None, None], 0.0)
        after = torch.where(real[:, None, None, None, None], after, sums)
        step = real.long()
    return out, (after, count + step)
