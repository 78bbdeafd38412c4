"""States that layers of transformers keep in a cache, which overwrites them in place."""

import torch
from torch import Tensor


def carried(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a cached state to a dtype; with gradients a copy, so that the backward pass finds it unchanged."""
    return state.to(dtype, copy=torch.is_grad_enabled())


def may_be_overwritten(state: Tensor) -> bool:
    """Return whether a step may overwrite a cached state: not if a backward pass may need it."""
    return not (torch.is_grad_enabled() or state.requires_grad)
