"""Log decays as numbers: the smallest ones, and exponentials without the denormal numbers that slow a CPU down."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import needs_autograd

LOWEST = -800.0  # a log decay; below it e^x is 0 in float64 too, so it stands for -inf
FAINT = {torch.float32: -86.0, torch.float64: -706.0}  # below, e^x is close to the smallest normal number or less


def faded(x: Tensor, to: torch.dtype | None = None) -> Tensor:
    """e^x, but 0 below ``FAINT`` of ``to``, x's own type by default. x may be overwritten.

    Such numbers, and what is computed with them, take a CPU many times as long as others.
    """
    if x.device.type != "cpu" or not x.numel():
        return x.exp()
    least = FAINT[to or x.dtype]
    if needs_autograd(x):
        return F.threshold(x.clamp(min=least - 1.0).exp(), math.exp(least), 0.0)
    if x.min() >= least:
        return x.exp_()
    return F.threshold(x.clamp_(min=least - 1.0).exp_(), math.exp(least), 0.0, inplace=True)
