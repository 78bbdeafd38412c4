"""Limits of log decays, and exponentials without denormal numbers, which slow a CPU down."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import needs_autograd

LOWEST = -800.0  # a log decay that stands for -inf: below it e^x is 0 even in float64
FAINT = {
    torch.float32: -86.0,
    torch.float64: -706.0,
}  # below these, e^x is close to the smallest normal number, or smaller


def faded(x: Tensor, to: torch.dtype | None = None) -> Tensor:
    """Return e^x, or 0 below ``FAINT`` of the dtype ``to`` (None: that of x). x may be overwritten.

    Denormal numbers, and products with them, take a CPU many times as long as others.
    """
    if x.device.type != "cpu" or not x.numel():
        return x.exp()
    least = FAINT[to or x.dtype]
    if needs_autograd(x):
        return F.threshold(x.clamp(min=least - 1.0).exp(), math.exp(least), 0.0)
    if x.min() >= least:
        return x.exp_()
    return F.threshold(x.clamp_(min=least - 1.0).exp_(), math.exp(least), 0.0, inplace=True)
