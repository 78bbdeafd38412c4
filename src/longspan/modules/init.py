"""Initialization of decays, and the weights of linear maps that torch has quantized."""

from typing import Any

import torch
from torch import Tensor


def linear_numbers(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear map, also of one that torch has quantised, which gives them when called."""
    if isinstance(layer.weight, Tensor):
        return layer.weight, layer.bias
    weight = layer.weight()
    return (weight.dequantize() if weight.is_quantized else weight), layer.bias()


def time_steps(*shape: int) -> Tensor:
    """A bias b with softplus(b) log-uniform between 1/1000 and 1/10: decays that remember 10 to 1000 tokens.

    Source: Gu and Dao 2023 (2312.00752), section 3.6.
    """
    steps = 10.0 ** (-3 + 2 * torch.rand(*shape))
    # The inverse of softplus, log(e^s - 1), without a difference of nearly equal numbers.
    return steps + torch.log(-torch.expm1(-steps))
