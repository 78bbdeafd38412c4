"""Prefix mode: the first tokens of a row see each other in both directions, later ones what is before them.

Source: Dong et al. 2019 (1905.03197), section 2.3, "sequence-to-sequence LM", for softmax. For any sum over keys it is
exact too: what the tokens of the prefix read is the state that the last of them leaves.
"""

import torch
from torch import Tensor


def inside(lengths: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
    """Which of n tokens are the first ``lengths`` real ones of their row: lengths (B,), mask (B,N) -> bool (B,N)."""
    if mask is None:
        return torch.arange(n, device=lengths.device) < lengths[:, None]
    return mask & (mask.cumsum(1) <= lengths[:, None])


def join(allowed: Tensor, prefix: Tensor) -> Tensor:
    """Who may see whom in one call: allowed bool (B|1,1,N,N) and the pairs inside the prefix (B,N) -> (B,1,N,N)."""
    return allowed | (prefix[:, None, :, None] & prefix[:, None, None, :])


def fold(
    k: Tensor, v: Tensor, prefix: Tensor, state: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Prefix mode for any causal sum S_t = S_{t-1} + k_t v_t^T: the state and the mask with which it is run.

    The keys of the prefix are written into the state that the row starts from, and masked so that they are not written
    again. Since the prefix comes first, its queries then read that state, and no kernel needs to know of prefixes. A
    masked token must read, though, as in ``linear.named`` and ``linear.attend``. One of ``gated.recur`` reads nothing:
    there, keys are set to 0 instead of giving the mask. Not for sums that decay, and not for the delta rule.

    k (B,H,N,D) after the feature map and v (B,H,N,E) of the state's dtype, prefix bool (B,N) from ``inside``, state
    (B,H,D,E) or None for zeros, mask bool (B,N) -> state (B,H,D,E), which shares no memory with the given one, mask
    (B,N). Time O(N D E), memory O(N (D + E)).
    """
    with torch.autocast(k.device.type, enabled=False):
        outside = ~prefix[:, None, :, None]
        sums = k.masked_fill(outside, 0.0).mT @ v.masked_fill(outside, 0.0)
        return sums if state is None else state + sums, ~prefix if mask is None else mask & ~prefix
