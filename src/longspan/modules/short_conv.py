"""The short causal depthwise convolution of recurrent layers."""

import torch
from torch import Tensor, nn

from ..ops.convolution import convolve
from ..ops.tensors import upcast_half


class ShortConvolution(nn.Module):
    """Mixes each channel with its own last few values: depthwise, causal, without a bias of its own.

    y_t = act(bias + sum_j weight[:, j] x_{t-width+1+j}), as ``causal_convolution`` has it; the last column belongs to
    the token itself, as in a causal ``nn.Conv1d``, whose initialisation this is. Sums are float32 at least.

    Source: So et al. 2021 (2109.08668), with width 3; width 4 since Gu and Dao 2023 (2312.00752).
    Raises ValueError for a width that reaches no earlier token.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        if width < 2:
            raise ValueError(f"a convolution of width={width} reaches no earlier token; 2 is the least")
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(channels, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def start(self, batch: int) -> Tensor:
        """The state before the first token: zeros (batch, width-1, channels), float32 at least."""
        return upcast_half(self.weight.new_zeros(batch, self.width - 1, self.channels))

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """x (B,N,channels), state (B,width-1,channels) -> y (B,N,channels) in x's dtype, the next state.

        The state holds the last width-1 real tokens, the oldest first; a given one is left as it was, unless
        ``donate=True`` allows it to be overwritten. mask (B,N) bool: a token that is not real is skipped, and its y
        means nothing. segments (B,N) int64, never decreasing from one real token to the next: a token sees its own
        only, the given state belongs to the first, the returned one to the last. bias (channels,), activation: silu.
        """
        past = self.start(x.shape[0]) if state is None else state
        options = {"activation": activation, "mask": mask, "segments": segments if x.shape[1] else None}
        return convolve(x, self.weight, bias, past, donate=donate, **options)
