"""Causal depthwise convolution before recurrent layers, in the layout of transformers: channels first."""

import torch
from torch import Tensor

from ...ops.convolution import causal_convolution
from .packing import borders
from .states import carried, may_be_overwritten

OURS = {"silu": "silu", "swish": "silu"}


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs,
) -> Tensor:
    """Replace ``causal_conv1d_fn``: each token sees the K - 1 before it, in its own sequence only.

    Args:
        hidden_states: (B,C,N), here C channels.
        weight: (C,K), here K taps.
        bias: (C,), or None.
        activation: name of an activation of transformers, or None.
        kwargs: boundaries of packed rows; see ``borders``.

    Returns:
        (B,C,N).

    References:
        transformers, ``causal_conv1d_fn``.
    """
    batch, _, n = hidden_states.shape
    act = OURS.get(activation or "")
    segments = borders(kwargs, batch, n)
    y, _ = causal_convolution(hidden_states.mT, weight, bias, activation=act, segments=segments)
    return _activated(y.mT, activation)


def update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Replace ``causal_conv1d_update``: continue the convolution, usually by one token.

    Args:
        hidden_states: (B,C,N), here C channels.
        conv_state: the last R >= K - 1 tokens (B,C,R), updated in place.
        weight: (C,K), here K taps.
        bias: (C,), or None.
        activation: name of an activation of transformers, or None.

    Returns:
        (B,C,N).

    References:
        transformers, ``causal_conv1d_update``.
    """
    donate, act = may_be_overwritten(conv_state), OURS.get(activation or "")
    known = conv_state.dtype in (hidden_states.dtype, torch.float32)
    past = carried(conv_state.mT, conv_state.dtype if known else hidden_states.dtype)
    y, state = causal_convolution(hidden_states.mT, weight, bias, past, activation=act, donate=donate)
    if state.data_ptr() != conv_state.data_ptr():
        conv_state.copy_(state.mT)
    return _activated(y.mT, activation)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    """Apply an activation that our function does not have."""
    if activation is None or activation in OURS:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)
