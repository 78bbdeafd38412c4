"""Feature maps: functions whose inner products stand in for the softmax kernel."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._utils.spec import known

FeatureMap = Callable[[Tensor], Tensor]


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 above zero, e^x below; positive (Katharopoulos et al. 2020, eq. 7). (..., D) -> (..., D)."""
    # As a sum, since (e^x - 1) + 1 has no digits left where e^x is small.
    return F.relu(x) + x.clamp(max=0.0).exp()


def relu(x: Tensor) -> Tensor:
    """max(x, 0). A query and a key may be orthogonal, so a row of weights can vanish. (..., D) -> (..., D)."""
    return F.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2: sharper than relu. (..., D) -> (..., D)."""
    return F.relu(x).square()


def exp(x: Tensor) -> Tensor:
    """e^min(x, 30): positive; the bound keeps sums of 1e5 products finite in float32. (..., D) -> (..., D)."""
    return x.clamp(max=30.0).exp()


def softmax(x: Tensor) -> Tensor:
    """e^x_i / sum_j e^x_j over the channels: positive, of sum one (Shen et al. 2018). (..., D) -> (..., D)."""
    return x.softmax(-1)


def dpfp(x: Tensor, nu: int = 1) -> Tensor:
    """Deterministic parameter-free projection: r_i r_{i+j} for j = 1 ... nu, where r = relu([x, -x]) is seen as a ring.

    (..., D) -> (..., 2 D nu), sparse and never negative. Raises ValueError for nu outside 1 ... 2 D - 1.

    Source: Schlag et al. 2021 (2102.11174), section 5.3.
    """
    size = 2 * x.shape[-1]
    if not 1 <= nu < size:
        raise ValueError(
            f"nu={nu} pairs each of {size} numbers with the next nu others, so it must be in 1 ... {size - 1}"
        )
    r = F.relu(torch.cat([x, -x], -1))
    return torch.cat([r * r.roll(-j, -1) for j in range(1, nu + 1)], -1)


def divisors(below: Tensor) -> Tensor:
    """Denominators, infinite where they are 0: a query that no key answers reads 0 then, and has no gradient."""
    return below.masked_fill(below == 0, torch.inf)


def sum_normalize(features: Tensor, eps: float = 1e-12) -> Tensor:
    """Divide by the sum of absolute values, or by ``eps`` where that is larger: (..., F) -> (..., F).

    The absolute values matter for features of either sign, whose plain sum could vanish; zeros stay zeros.

    Source: Schlag et al. 2021 (2102.11174), section 4.2, where features are positive.
    """
    return F.normalize(features, p=1.0, dim=-1, eps=eps)


MAPS: dict[str, FeatureMap] = {"elu": elu, "relu": relu, "squared_relu": squared_relu, "exp": exp}


def _elu_into(x: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    torch.clamp(x, min=0.0, out=spare)
    return torch.clamp(x, max=0.0, out=out).exp_().add_(spare)


def _squared_relu_into(x: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    return torch.clamp(x, min=0.0, out=out).square_()


# (x, out, spare) -> out = phi(x): the same maps, written where they are wanted. ``spare``, of the same shape, is
# overwritten; x may be ``out`` itself.
WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "elu": _elu_into,
    "relu": lambda x, out, spare: torch.clamp(x, min=0.0, out=out),
    "squared_relu": _squared_relu_into,
    "exp": lambda x, out, spare: torch.clamp(x, max=30.0, out=out).exp_(),
}

# (x, y) -> phi'(x), written over y = phi(x). Where a masked key has y = 0, so is its slope.
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elu": lambda x, y: y.clamp_(max=1.0),
    "relu": lambda x, y: y.sign_(),
    "squared_relu": lambda x, y: y.sqrt_().mul_(2.0),
    "exp": lambda x, y: y.masked_fill_(x > 30.0, 0.0),
}


def feature_map(choice: str | FeatureMap, dim: int) -> FeatureMap:
    """A feature map by name, or a callable of your own, ``(..., D) -> (..., F)``, for heads of ``dim`` channels.

    Raises ValueError for an unknown name, for something that is neither, and for a callable with negative values: a
    normalized mechanism divides by a sum of products of features, which could vanish or change sign.
    """
    if isinstance(choice, str):
        return MAPS[known(choice, MAPS, "feature map")]
    if not callable(choice):
        raise ValueError(f"feature_map is a name ({', '.join(MAPS)}) or a callable, not {type(choice).__name__}")
    with torch.no_grad():
        probe = torch.cat([torch.linspace(-30, 30, 241), torch.tensor([-1e-4, 1e-4])])[:, None].expand(-1, dim)
        lowest = choice(probe).min().item()
    if not lowest >= 0:
        raise ValueError(
            f"feature map {getattr(choice, '__name__', choice)!r} reaches {lowest:.3g}; a normalized mechanism divides "
            f"by a sum of products of features, so they must not be negative"
        )
    return choice
