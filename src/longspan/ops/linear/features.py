"""Feature maps: functions whose inner products replace the softmax kernel."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._utils.spec import known

FeatureMap = Callable[[Tensor], Tensor]


def elu(x: Tensor) -> Tensor:
    """Return elu(x) + 1, which is positive (Katharopoulos et al. 2020, eq. 7): (..., D) -> (..., D)."""
    # A sum, since (e^x - 1) + 1 loses its digits if e^x is small.
    return F.relu(x) + x.clamp(max=0.0).exp()


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0): (..., D) -> (..., D). All weights of a query can be 0."""
    return F.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2, which is sharper than relu: (..., D) -> (..., D)."""
    return F.relu(x).square()


def exp(x: Tensor) -> Tensor:
    """Return e^min(x, 30): (..., D) -> (..., D). The bound keeps sums of 1e5 products finite in float32."""
    return x.clamp(max=30.0).exp()


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the channels (Shen et al. 2018): (..., D) -> (..., D)."""
    return x.softmax(-1)


def dpfp(x: Tensor, nu: int = 1) -> Tensor:
    """Deterministic parameter-free projection: r_i r_{i+j} for j = 1 ... nu, with r = relu([x, -x]) as a ring.

    Args:
        x: (..., D).
        nu: The number of shifts.

    Returns:
        (..., 2 D nu), sparse and never negative.

    Raises:
        ValueError: nu is not in 1 ... 2 D - 1.

    References:
        Schlag et al. 2021 (2102.11174), section 5.3.
    """
    size = 2 * x.shape[-1]
    if not 1 <= nu < size:
        raise ValueError(
            f"nu={nu} pairs each of {size} numbers with the next nu numbers, so it must be in 1 ... {size - 1}"
        )
    r = F.relu(torch.cat([x, -x], -1))
    return torch.cat([r * r.roll(-j, -1) for j in range(1, nu + 1)], -1)


def divisors(below: Tensor) -> Tensor:
    """Replace denominators of 0 by infinity, so that such queries read 0 and have no gradient."""
    return below.masked_fill(below == 0, torch.inf)


def sum_normalize(features: Tensor, eps: float = 1e-12) -> Tensor:
    """Divide by the sum of absolute values, at least ``eps``: (..., F) -> (..., F).

    Absolute values, since the sum of features of both signs could be 0. Zeros stay zeros.

    References:
        Schlag et al. 2021 (2102.11174), section 4.2, where features are positive.
    """
    return F.normalize(features, p=1.0, dim=-1, eps=eps)


MAPS: dict[str, FeatureMap] = {"elu": elu, "relu": relu, "squared_relu": squared_relu, "exp": exp}


def _elu_into(x: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    torch.clamp(x, min=0.0, out=spare)
    return torch.clamp(x, max=0.0, out=out).exp_().add_(spare)


def _squared_relu_into(x: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    return torch.clamp(x, min=0.0, out=out).square_()


# (x, out, spare) -> out = phi(x): the same maps with an output argument. ``spare``, of the same shape, is overwritten;
# x may be ``out`` itself.
WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "elu": _elu_into,
    "relu": lambda x, out, spare: torch.clamp(x, min=0.0, out=out),
    "squared_relu": _squared_relu_into,
    "exp": lambda x, out, spare: torch.clamp(x, max=30.0, out=out).exp_(),
}

# (x, y) -> phi'(x), written over y = phi(x). The slope of a masked key with y = 0 is 0.
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elu": lambda x, y: y.clamp_(max=1.0),
    "relu": lambda x, y: y.sign_(),
    "squared_relu": lambda x, y: y.sqrt_().mul_(2.0),
    "exp": lambda x, y: y.masked_fill_(x > 30.0, 0.0),
}


def feature_map(choice: str | FeatureMap, dim: int) -> FeatureMap:
    """Return the feature map of a name, or check a callable.

    Args:
        choice: A name in ``MAPS``, or a callable (..., D) -> (..., F).
        dim: Channels of a head.

    Returns:
        A callable.

    Raises:
        ValueError: the name is unknown, the choice is neither a name nor a callable, or the callable has negative
            values. A normalized mechanism divides by a sum of feature products, which must not be 0 or negative.
    """
    if isinstance(choice, str):
        return MAPS[known(choice, MAPS, "feature map")]
    if not callable(choice):
        raise ValueError(f"feature_map must be a name ({', '.join(MAPS)}) or a callable, not {type(choice).__name__}")
    with torch.no_grad():
        probe = torch.cat([torch.linspace(-30, 30, 241), torch.tensor([-1e-4, 1e-4])])[:, None].expand(-1, dim)
        lowest = choice(probe).min().item()
    if not lowest >= 0:
        raise ValueError(
            f"feature map {getattr(choice, '__name__', choice)!r} reaches {lowest:.3g}; a normalized mechanism divides "
            f"by a sum of feature products, so features must not be negative"
        )
    return choice
