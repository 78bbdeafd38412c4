"""Checks of mask, segments and state that operations and modules share."""

from typing import Any

import torch
from torch import Tensor


def describe(value: Any) -> str:
    """Describe a value in an error message: dtype and shape of a tensor, or the type of anything else."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_mask(name: str, mask: Any, shape: tuple[int, ...], kept: str = "real tokens") -> None:
    """Raise ValueError unless ``mask`` is a bool tensor of this shape."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise ValueError(f"{name} must be bool {shape}, True on {kept}, not {describe(mask)}")


def check_segments(segments: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``segments`` is an int64 tensor of this shape."""
    if not isinstance(segments, Tensor) or segments.dtype != torch.int64 or tuple(segments.shape) != shape:
        raise ValueError(f"segments must be int64 {shape}, one id per token, not {describe(segments)}")


def check_state(state: Any, layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``state`` is a tensor of this shape and dtype; ``layout`` names its axes."""
    if not isinstance(state, Tensor) or state.dtype != dtype or tuple(state.shape) != shape:
        raise ValueError(f"state must be {dtype} {layout} = {shape}, not {describe(state)}")
