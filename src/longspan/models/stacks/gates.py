"""Residual connections: addition, and the learned gates of GTrXL."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._utils import spec


class Add(nn.Module):
    """x + y, the residual connection of Vaswani et al. 2017, section 3.1."""

    def __init__(self, dim: int):
        super().__init__()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Gate(nn.Module):
    """A gate of GTrXL: ``gate(x, y)`` joins the residual stream x and the output y of a sub-layer, (B,N,dim) each.

    A relu is applied to y before the gate. Otherwise two linear maps would follow each other without a nonlinearity.

    ``bias``: Initial bias of the gate towards the stream.

    References:
        Parisotto et al. 2019 (1910.06764), section 3.2.
    """

    maps: tuple[str, ...] = ()

    def __init__(self, dim: int, *, bias: float = 2.0):
        super().__init__()
        self.linear = nn.ModuleDict({name: nn.Linear(dim, dim, bias=False) for name in self.maps})
        # Not a bias of a linear map, which initialization would set to zero.
        self.bias, self.lean = float(bias), nn.Parameter(torch.full((dim,), float(bias)))

    def reset_parameters(self) -> None:
        """Set the bias to its first value; its maps draw their own weights."""
        nn.init.constant_(self.lean, self.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.join(x, F.relu(y))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """Join x and y, after the relu."""
        raise AssertionError(f"{type(self).__name__} does not define join")


class Input(Gate):
    """sigmoid(W x + b) * x + y."""

    maps = ("stream",)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(self.linear["stream"](x) + self.lean) * x + y


class Output(Gate):
    """x + sigmoid(W x - b) * y."""

    maps = ("stream",)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + torch.sigmoid(self.linear["stream"](x) - self.lean) * y


class Highway(Gate):
    """s * x + (1 - s) * y with s = sigmoid(W x + b)."""

    maps = ("stream",)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(y, x, torch.sigmoid(self.linear["stream"](x) + self.lean))


class SigTanh(Gate):
    """x + sigmoid(W y - b) * tanh(U y)."""

    maps = ("gate", "value")

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + torch.sigmoid(self.linear["gate"](y) - self.lean) * torch.tanh(self.linear["value"](y))


class GRU(Gate):
    """(1 - z) x + z h: h = tanh(W_h y + U_h (r x)), r = sigmoid(W_r y + U_r x), z = sigmoid(W_z y + U_z x - b)."""

    maps = ("reset_y", "reset_x", "update_y", "update_x", "new_y", "new_x")

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        r = torch.sigmoid(self.linear["reset_y"](y) + self.linear["reset_x"](x))
        z = torch.sigmoid(self.linear["update_y"](y) + self.linear["update_x"](x) - self.lean)
        return torch.lerp(x, torch.tanh(self.linear["new_y"](y) + self.linear["new_x"](r * x)), z)


GATES = {"add": Add, "gru": GRU, "input": Input, "output": Output, "highway": Highway, "sigtanh": SigTanh}


def build(text: str, dim: int) -> nn.Module:
    """Build a gate from its spec, such as ``add``, ``gru`` or ``gru(bias=1.0)``.

    Raises ValueError for an unknown gate, an unknown option, or a value of the wrong type.
    """
    made = spec.parse(text, {name: functools.partial(gate, dim) for name, gate in GATES.items()})
    if not isinstance(made, Add | Gate):
        raise ValueError(f"{text!r} is not a residual gate; known: {', '.join(sorted(GATES))}")
    return made
