"""Step sizes, log decays and their limits, and exponentials without denormal numbers, which slow a CPU down."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operands import needs_autograd
from ..tensors import upcast_half

LOWEST = -800.0  # a log decay that stands for -inf: below it e^x is 0 even in float64
FAINT = {
    torch.float32: -86.0,
    torch.float64: -706.0,
}  # below these, e^x is close to the smallest normal number, or smaller


def step_sizes(x: Tensor, bias: Tensor) -> Tensor:
    """Return softplus(x + bias) in float32 at least: bfloat16 would round a bias of -7, and the result, by 1/60."""
    return F.softplus(upcast_half(x) + upcast_half(bias))


def log_decay(a_log: Tensor, x: Tensor, bias: Tensor, lower_bound: float | None = None) -> Tensor:
    r"""Return $-e^a \mathrm{softplus}(x + b)$, or $l \sigma(e^a (x + b))$ for a lower bound l, in float32 at least.

    References:
        Yang, Kautz and Hatamizadeh 2024 (2412.06464), section 3.4; Kimi Team 2025 (2510.26692), section 4.
    """
    rate = upcast_half(a_log).exp()
    if lower_bound is None:
        return -rate * step_sizes(x, bias)
    return lower_bound * (rate * (upcast_half(x) + upcast_half(bias))).sigmoid()


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
