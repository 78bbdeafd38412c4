"""The token shift of RWKV: for each token, the one before it."""

import torch
from torch import Tensor

from ..ops.convolution import convolve
from ..ops.tensors import upcast_half


def shift_start(like: Tensor, batch: int, channels: int) -> Tensor:
    """Return the state before the first token, zeros (batch,1,channels) in float32 at least; ``like`` any tensor."""
    return upcast_half(like.new_zeros(batch, 1, channels))


def shift(
    x: Tensor, last: Tensor, *, mask: Tensor | None = None, segments: Tensor | None = None, donate: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the token before each token, and the last token.

    Args:
        x: (B,N,C).
        last: (B,1,C), the token before the first one; zeros if there is none.
        mask: (B,N) bool, True on real tokens. Other tokens are skipped, and what is returned for them is undefined.
        segments: (B,N) int64, packed sequences. The first token of each follows zeros; ``last`` belongs to the first.
        donate: Allow ``last`` to be overwritten.

    Returns:
        The tokens before (B,N,C) in the dtype of x, and the last real token (B,1,C) in the dtype of ``last``.
    """
    if mask is None and segments is None:
        joined = torch.cat([last.to(x.dtype), x], 1)
        # A copy: a view would keep all tokens in memory.
        return joined[:, :-1], joined[:, -1:].to(last.dtype, copy=True)
    weight = torch.tensor([1.0, 0.0], dtype=x.dtype, device=x.device).expand(x.shape[2], 2)
    return convolve(x, weight.contiguous(), None, last, mask=mask, segments=segments, donate=donate)
