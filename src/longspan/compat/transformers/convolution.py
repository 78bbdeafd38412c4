"""Causal depthwise convolution before recurrent layers, in the layout of transformers: channels first."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.convolution import causal_convolution
from ...ops.rows import gather_valid, last_valid
from .packing import borders, real
from .states import carried, may_be_overwritten

OURS = {"silu": "silu", "swish": "silu"}


def convolve(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs
) -> Tensor:
    """Replace ``causal_conv1d_fn`` of transformers: each token sees the K - 1 before it, in its own sequence only.

    hidden_states (B,C,N) of C channels, weight (C,K), bias (C,) -> (B,C,N). ``activation`` is a name that transformers
    has. ``kwargs`` may have the boundaries of packed rows; see ``borders``.
    """
    batch, _, n = hidden_states.shape
    act = OURS.get(activation or "")
    mask, segments = real(batch, n, earlier=True), borders(kwargs, batch, n)
    y, _ = causal_convolution(hidden_states.mT, weight, bias, activation=act, mask=mask, segments=segments)
    return _activated(y.mT, activation)


def update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Replace ``causal_conv1d_update`` of transformers: continue the convolution, usually by one token.

    ``conv_state`` (B,C,R), the last R >= K - 1 tokens, is updated in place. The other arguments are those of
    ``convolve``.
    """
    donate, act = may_be_overwritten(conv_state), OURS.get(activation or "")
    known = conv_state.dtype in (hidden_states.dtype, torch.float32)
    past = carried(conv_state.mT, conv_state.dtype if known else hidden_states.dtype)
    mask = real(len(past), hidden_states.shape[2])
    y, state = causal_convolution(hidden_states.mT, weight, bias, past, activation=act, mask=mask, donate=donate)
    if state.data_ptr() != conv_state.data_ptr():
        conv_state.copy_(state.mT)
    return _activated(y.mT, activation)


def with_real_tokens(original: Callable) -> Callable:
    """Make ``LinearAttentionLayer.update_conv_state`` keep the last real tokens, where the original keeps padding."""

    @functools.wraps(original)
    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        tokens = original(self, conv_states, state_idx, **kwargs)  # (B,C,M), earlier ones too
        # First, so that a compiler sees only the original.
        if torch.compiler.is_compiling() or (mask := real(len(tokens), tokens.shape[2], earlier=True)) is None:
            return tokens
        slots = self.conv_states[state_idx].shape[2]
        (ordered,) = gather_valid(mask, tokens.mT)
        kept = last_valid(F.pad(ordered, (0, 0, slots, 0)), mask, slots).mT
        if self.record_past:
            self.conv_states[state_idx] = kept
        else:
            self.conv_states[state_idx].copy_(kept)
        return tokens

    return update_conv_state


def _activated(y: Tensor, activation: str | None) -> Tensor:
    """Apply an activation that our function does not have."""
    if activation is None or activation in OURS:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)
