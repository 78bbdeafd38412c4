"""States that layers of transformers keep in a cache, which overwrites them in place."""

import torch
from torch import Tensor


def carried(state: Tensor, dtype: torch.dtype) -> Tensor:
    """A cached state in this dtype; under gradients a copy, which the backward pass finds as the forward read it."""
    return state.to(dtype, copy=torch.is_grad_enabled())


def may_be_overwritten(state: Tensor) -> bool:
    """Whether a step may write the next state over a cached one: a backward pass may still need one with gradients."""
    return not (torch.is_grad_enabled() or state.requires_grad)
