"""The causal depth-wise convolution before recurrent layers, for packed rows too."""

import torch.nn.functional as F
from torch import Tensor

from ...ops.tensors import widen
from .packing import borders


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs,
) -> Tensor:
    """x (B,C,N), weight (C,K), bias (C,) -> (B,C,N): each token sees K - 1 before it, of its own sequence alone.

    Borders of packed rows are in ``kwargs``: see ``borders``.

    Source: transformers, ``causal_conv1d_fn``.
    """
    from transformers.activations import ACT2FN

    batch, _, n = hidden_states.shape
    x, w, reach = widen(hidden_states), widen(weight), weight.shape[-1] - 1
    ids, y = borders(kwargs, batch, n), x * w[:, reach, None]
    for back in range(1, min(reach, n - 1) + 1):
        tap = x[..., :-back]
        if ids is not None:
            tap = tap * (ids[:, back:] == ids[:, :-back])[:, None]
        y = y + F.pad(tap * w[:, reach - back, None], (back, 0))
    if bias is not None:
        y = y + widen(bias)[:, None]
    return (y if activation is None else ACT2FN[activation](y)).to(hidden_states.dtype)


def unpacked(hidden_states: Tensor, *args, **kwargs) -> str:
    """Why a call is left to the original: its rows are not packed."""
    del args
    return "" if borders(kwargs, hidden_states.shape[0], hidden_states.shape[-1]) is not None else "rows are not packed"
