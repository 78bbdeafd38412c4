"""Initialization of decays, and access to the weights of quantized linear maps."""

import math
import sys
from typing import Any

import torch
from torch import Tensor


def linear_numbers(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear map, which may be quantized by torch."""
    if isinstance(layer.weight, Tensor):
        return layer.weight, layer.bias
    weight = layer.weight()
    return (weight.dequantize() if weight.is_quantized else weight), layer.bias()


def fill(own: Tensor, value: Tensor) -> None:
    """Copy numbers into a weight; of a sharded one each process gets its part of the first one's numbers."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(own, module.DTensor):
        part: Any = own
        value = module.distribute_tensor(value.to(own.device), part.device_mesh, part.placements)
    own.copy_(value)


def time_steps(*shape: int, low: float = 1e-3, high: float = 0.1, floor: float = 0.0) -> Tensor:
    """Draw biases b with softplus(b) log-uniform between two numbers, by default for decays over 10 to 1000 tokens.

    Args:
        shape: Shape of the biases.
        low: The smallest softplus(b).
        high: The largest softplus(b).
        floor: What smaller ones are raised to.

    References:
        Gu and Dao 2023 (2312.00752), section 3.6.
    """
    least, most = math.log10(low), math.log10(high)
    steps = (10.0 ** (least + (most - least) * torch.rand(*shape))).clamp(min=floor)
    # The inverse of softplus, log(e^s - 1), without cancellation.
    return steps + torch.log(-torch.expm1(-steps))
