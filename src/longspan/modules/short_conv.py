"""The short causal depthwise convolution of recurrent layers."""

import torch
from torch import Tensor, nn

from ..ops.convolution import convolve
from ..ops.tensors import upcast_half


class ShortConvolution(nn.Module):
    """A short causal depthwise convolution over the last ``width`` values of each channel.

    y_t = act(bias + sum_j weight[:, j] x_{t-width+1+j}), as in ``causal_convolution``; the last column of the weight
    belongs to the token itself. Weights are initialized as in ``nn.Conv1d``. Sums are in float32 or better.

    Args:
        channels: Number of channels.
        width: Length of the kernel, at least 2.

    Raises:
        ValueError: For a width below 2.

    References:
        So et al. 2021 (2109.08668), with width 3; Gu and Dao 2023 (2312.00752), with width 4.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        if width < 2:
            raise ValueError(f"width={width} must be at least 2")
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as ``nn.Conv1d`` does."""
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)

    def start(self, batch: int) -> Tensor:
        """Return the state before the first token: zeros (batch, width-1, channels), in float32 or better."""
        # Not weight.new_zeros: a sharded weight would give a sharded state.
        like = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        return upcast_half(like.new_zeros(batch, self.width - 1, self.channels))

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
        """Convolve, from the start or after a state.

        Args:
            x: (B,N,channels).
            state: (B,width-1,channels), the last width-1 real tokens, oldest first; None: zeros.
            bias: (channels,), added before the activation.
            activation: ``silu`` or None.
            mask: (B,N) bool, True on real tokens. Other tokens are skipped, and their outputs are undefined.
            segments: (B,N) int64, nondecreasing over real tokens. Tokens see their own segment only; the given state
                belongs to the first segment, the returned one to the last.
            donate: Allow the state to be overwritten.

        Returns:
            y (B,N,channels) in the dtype of x, and the next state.
        """
        past = self.start(x.shape[0]) if state is None else state
        options = {"activation": activation, "mask": mask, "segments": segments}
        return convolve(x, self.weight, bias, past, donate=donate, **options)
