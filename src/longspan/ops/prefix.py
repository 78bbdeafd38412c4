"""Prefix mode: the first tokens of a row see each other in both directions, later tokens are causal.

Reference: Dong et al. 2019 (1905.03197), section 2.3, "sequence-to-sequence LM", for softmax. Prefix mode is also exact
for any sum over keys: all tokens of the prefix read the state after the last of them.
"""

import torch
from torch import Tensor


def inside(lengths: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
    """Return which of n tokens are in the prefix of ``lengths`` (B,) real tokens: mask (B,N) -> bool (B,N)."""
    if mask is None:
        return torch.arange(n, device=lengths.device) < lengths[:, None]
    return mask & (mask.cumsum(1) <= lengths[:, None])


def join(allowed: Tensor, prefix: Tensor) -> Tensor:
    """Add the pairs inside the prefix (B,N) to the allowed pairs: bool (B|1,1,N,N) -> (B,1,N,N)."""
    return allowed | (prefix[:, None, :, None] & prefix[:, None, None, :])


def fold(
    k: Tensor, v: Tensor, prefix: Tensor, state: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the state and the mask that run a causal sum S_t = S_{t-1} + k_t v_t^T in prefix mode.

    The keys of the prefix are added to the state before the row, and masked so that they are not added again. The
    queries of the prefix then read that state, and kernels need no support for prefixes. This requires that masked
    tokens still read, as in ``linear.named`` and ``linear.attend``. In ``gated.recur`` masked tokens read nothing:
    set their keys to 0 there instead of passing the mask. Not for sums with decay, and not for the delta rule.

    Args:
        k: (B,H,N,D) after the feature map, in the dtype of the state.
        v: (B,H,N,E), in the dtype of the state.
        prefix: (B,N) bool, from ``inside``.
        state: (B,H,D,E), or None for zeros.
        mask: (B,N) bool, True = a real token.

    Returns:
        The state (B,H,D,E), which shares no memory with the given one, and the mask (B,N). Time is O(N D E), memory
        O(N (D + E)).
    """
    with torch.autocast(k.device.type, enabled=False):
        outside = ~prefix[:, None, :, None]
        sums = k.masked_fill(outside, 0.0).mT @ v.masked_fill(outside, 0.0)
        return sums if state is None else state + sums, ~prefix if mask is None else mask & ~prefix
